# Target torch_stable: the headers and the library of a torch that the op library is built against.
# Any torch from 2.11 on gives the same binary interface; it is not imported.
if(FLASHATTN_EXT_TORCH_DIR)
  set(torch_dir ${FLASHATTN_EXT_TORCH_DIR})
else()
  find_package(Python COMPONENTS Interpreter REQUIRED)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c
      "import importlib.util as u; print(*u.find_spec('torch').submodule_search_locations, end='')"
    OUTPUT_VARIABLE torch_dir RESULT_VARIABLE failed ERROR_QUIET)
  if(failed)
    message(FATAL_ERROR "${Python_EXECUTABLE} has no torch: install torch >= 2.11 there, "
      "or name another interpreter with -DPython_EXECUTABLE=...")
  endif()
endif()

file(READ ${torch_dir}/version.py torch_version_file)
string(REGEX MATCH "__version__ = '([^']+)'" _ "${torch_version_file}")
set(torch_version ${CMAKE_MATCH_1})
if(torch_version VERSION_LESS 2.11)
  message(FATAL_ERROR "torch >= 2.11 is needed, but ${torch_dir} is torch ${torch_version}")
endif()
message(STATUS "torch ${torch_version} in ${torch_dir}")

add_library(torch_stable INTERFACE)
target_include_directories(torch_stable SYSTEM INTERFACE ${torch_dir}/include)
target_compile_definitions(torch_stable INTERFACE TORCH_TARGET_VERSION=0x020b000000000000)
target_link_libraries(torch_stable INTERFACE ${torch_dir}/lib/libtorch_cpu.so)
