// What this binary was built from, for flashattn_ext/_library.py to compare with the Python files.
extern "C" __attribute__((visibility("default"))) const char* flashattn_ext_build_stamp() {
  return STAMP;
}
