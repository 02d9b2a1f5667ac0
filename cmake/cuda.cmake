# Finds nvcc and makes the targets cuda (every architecture) and cuda_sm90 (Hopper only) of
# CUDA_SOURCES and CUDA_SM90_SOURCES. Where nvcc is missing, AUTO leaves the kernels out.

# nvcc: as told, from PATH or CUDA_HOME, or from the PyPI packages beside Python.
find_package(Python COMPONENTS Interpreter QUIET)
if(Python_EXECUTABLE)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c
      "import nvidia, os; print(';'.join(os.path.join(p, 'cu13') for p in nvidia.__path__), end='')"
    OUTPUT_VARIABLE nvidia_packages ERROR_QUIET)
endif()
if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  find_program(NVCC nvcc PATH_SUFFIXES bin NO_CMAKE_SYSTEM_PATH
    PATHS $ENV{CUDA_HOME} ${nvidia_packages})
  if(NVCC)
    set(CMAKE_CUDA_COMPILER ${NVCC})
  endif()
endif()
if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  if(NOT FLASHATTN_EXT_CUDA STREQUAL AUTO)
    message(FATAL_ERROR "FLASHATTN_EXT_CUDA=${FLASHATTN_EXT_CUDA}, but there is no nvcc: "
      "put it on PATH, set CUDA_HOME, or pip install nvidia-cuda-nvcc")
  endif()
  message(STATUS "CUDA kernels: left out, no nvcc found")
  return()
endif()

# The PyPI packages keep libraries in lib, where nvcc and CMake look in lib64 only.
cmake_path(GET CMAKE_CUDA_COMPILER PARENT_PATH cuda_lib)
cmake_path(APPEND cuda_lib ../lib)
cmake_path(NORMAL_PATH cuda_lib)
set(ENV{LIBRARY_PATH} "$ENV{LIBRARY_PATH}:${cuda_lib}")

set(CMAKE_CUDA_ARCHITECTURES OFF)  # each target names its own
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
enable_language(CUDA)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake before 3.26 does not know that nvcc has C++20
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
endif()
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.0)
  message(FATAL_ERROR "nvcc ${CMAKE_CUDA_COMPILER_VERSION} has no C++20: "
    "install CUDA >= 12.0, or set FLASHATTN_EXT_CUDA=0 for the CPU kernels alone")
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)

# Only what this nvcc knows: CUDA 12.4 has no Blackwell, for example.
execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --list-gpu-arch OUTPUT_VARIABLE known)
foreach(arch IN LISTS FLASHATTN_EXT_CUDA_ARCHITECTURES)
  string(REGEX MATCH "^[0-9]+" number ${arch})
  if(known MATCHES "compute_${number}\n")
    list(APPEND architectures ${arch})
  else()
    message(WARNING "nvcc ${CMAKE_CUDA_COMPILER_VERSION} cannot compile for sm_${arch}")
  endif()
endforeach()
string(REPLACE ";" "," cuda_description "${CMAKE_CUDA_COMPILER_VERSION}:${architectures}")
message(STATUS "CUDA kernels: nvcc ${CMAKE_CUDA_COMPILER_VERSION} for sm_${architectures}")

add_library(cuda_rules INTERFACE)
target_compile_options(cuda_rules INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:
  --expt-relaxed-constexpr
  -Xcompiler=-Wall,-Wextra
  -Xptxas=--warn-on-spills,--warn-on-local-memory-usage>)
target_include_directories(cuda_rules SYSTEM INTERFACE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
target_link_directories(cuda_rules INTERFACE ${cuda_lib})
target_link_libraries(cuda_rules INTERFACE rules)

# Code for each architecture, and PTX of the newest for those to come.
list(TRANSFORM architectures APPEND -real OUTPUT_VARIABLE real)
list(GET architectures -1 newest)
add_library(cuda OBJECT ${CUDA_SOURCES})
set_target_properties(cuda PROPERTIES CUDA_ARCHITECTURES "${real};${newest}-virtual")
target_link_libraries(cuda PUBLIC cuda_rules)
target_compile_definitions(cuda INTERFACE FLASHATTN_HAS_CUDA=1)

if(CUDA_SM90_SOURCES AND "90a" IN_LIST architectures)
  add_library(cuda_sm90 OBJECT ${CUDA_SM90_SOURCES})
  set_target_properties(cuda_sm90 PROPERTIES CUDA_ARCHITECTURES 90a-real)
  target_link_libraries(cuda_sm90 PUBLIC cuda_rules)
  target_compile_definitions(cuda PRIVATE FLASHATTN_HAS_SM90=1)
endif()
