# The CUDA part of libputget.so: finding a compiler that works, and adding native/cuda to the library.
#
# Where a compiler is looked for, first found wins:
#   1. -DCMAKE_CUDA_COMPILER=...                 the caller's choice
#   2. the nvcc that an earlier configuration of this build folder found
#   3. the nvidia-cuda-nvcc package of the Python that builds (no toolkit on the machine)
#   4. the environment variable CUDACXX, nvcc on PATH, /usr/local/cuda/bin/nvcc
#
# PyPI's packages differ from a toolkit in one point that matters here: libraries lie in lib, not lib64, and nvcc.profile
# names only lib64, so the linker has to be told.

# sm_90 machine code, and PTX that the driver compiles for later chips.
set(PUTGET_CUDA_ARCHITECTURES "90-real;90-virtual" CACHE STRING "CMAKE_CUDA_ARCHITECTURES of the CUDA part")

function(_putget_find_nvcc out)
  if(CMAKE_CUDA_COMPILER)
    set(${out} ${CMAKE_CUDA_COMPILER} PARENT_SCOPE)
    return()
  endif()
  if(EXISTS "${PUTGET_NVCC_THAT_WORKS}")
    set(${out} ${PUTGET_NVCC_THAT_WORKS} PARENT_SCOPE)
    return()
  endif()
  find_package(Python QUIET COMPONENTS Interpreter)
  if(Python_Interpreter_FOUND)
    execute_process(
      COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/find_nvcc.py
      OUTPUT_VARIABLE nvcc OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
  if(NOT nvcc AND EXISTS "$ENV{CUDACXX}")
    set(nvcc $ENV{CUDACXX})
  endif()
  if(NOT nvcc)
    unset(nvcc)  # find_program leaves a variable alone that is set, even to nothing
    find_program(nvcc nvcc PATHS /usr/local/cuda/bin NO_CACHE)
  endif()
  if(nvcc)
    set(${out} ${nvcc} PARENT_SCOPE)
  else()
    set(${out} "" PARENT_SCOPE)
  endif()
endfunction()

# Compiles and links a kernel as the library will. CMake's own check would end the configuration of a machine whose nvcc
# does not work (a host compiler that it does not know, a toolkit without sm_90), which can still have the CPU part.
function(_putget_try_nvcc nvcc link_dir out)
  set(source ${CMAKE_BINARY_DIR}/putget_try_nvcc.cu)
  file(WRITE ${source} "__global__ void kernel() {}\nint main() { kernel<<<1, 1>>>(); return 0; }\n")
  execute_process(
    COMMAND ${nvcc} -std=c++17 -arch=sm_90 -ccbin ${CMAKE_CXX_COMPILER} -cudart static -L${link_dir}
            -o ${CMAKE_BINARY_DIR}/putget_try_nvcc ${source}
    RESULT_VARIABLE status OUTPUT_VARIABLE text ERROR_VARIABLE text)
  if(status EQUAL 0)
    set(${out} "" PARENT_SCOPE)
  else()
    set(${out} "${nvcc} cannot build a kernel for sm_90 here:\n${text}" PARENT_SCOPE)
  endif()
endfunction()

# Sets PUTGET_NVCC, PUTGET_CUDA_ROOT and PUTGET_CUDA_LINK_DIR, or leaves PUTGET_NVCC empty and says why in PUTGET_NO_CUDA.
function(_putget_choose_cuda)
  set(PUTGET_NVCC "" PARENT_SCOPE)
  if(PUTGET_CUDA STREQUAL "OFF")
    set(PUTGET_NO_CUDA "PUTGET_CUDA=OFF" PARENT_SCOPE)
    return()
  endif()
  _putget_find_nvcc(nvcc)
  if(NOT nvcc)
    set(PUTGET_NO_CUDA "no nvcc: neither the Python package nvidia-cuda-nvcc, nor CUDACXX, nor nvcc on PATH" PARENT_SCOPE)
    return()
  endif()
  # The launcher on PATH may be a link (/usr/bin/nvcc); libraries are found beside what it points to.
  file(REAL_PATH ${nvcc} nvcc_real)
  get_filename_component(bin ${nvcc_real} DIRECTORY)
  get_filename_component(root ${bin} DIRECTORY)
  find_path(link_dir libcudart_static.a PATHS ${root}/lib64 ${root}/lib ${root}/lib/${CMAKE_LIBRARY_ARCHITECTURE}
    /usr/lib/${CMAKE_LIBRARY_ARCHITECTURE} NO_DEFAULT_PATH NO_CACHE)
  if(NOT link_dir)
    set(PUTGET_NO_CUDA "no libcudart_static.a beside ${nvcc_real}" PARENT_SCOPE)
    return()
  endif()
  if(NOT nvcc STREQUAL "${PUTGET_NVCC_THAT_WORKS}")
    _putget_try_nvcc(${nvcc} ${link_dir} error)
    if(error)
      set(PUTGET_NO_CUDA "${error}" PARENT_SCOPE)
      return()
    endif()
    set(PUTGET_NVCC_THAT_WORKS ${nvcc} CACHE INTERNAL "The nvcc that passed the check")
  endif()
  set(PUTGET_NVCC ${nvcc} PARENT_SCOPE)
  set(PUTGET_CUDA_ROOT ${root} PARENT_SCOPE)
  set(PUTGET_CUDA_LINK_DIR ${link_dir} PARENT_SCOPE)
endfunction()

_putget_choose_cuda()

if(PUTGET_NVCC)
  set(CMAKE_CUDA_COMPILER ${PUTGET_NVCC})
  set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER})
  set(CMAKE_CUDA_ARCHITECTURES ${PUTGET_CUDA_ARCHITECTURES})
  # Only CMake's own check of the compiler needs this flag; the library names its directory itself.
  set(CMAKE_CUDA_FLAGS_INIT "-L${PUTGET_CUDA_LINK_DIR}")
  enable_language(CUDA)
  message(NOTICE "putget: CPU and CUDA parts (${PUTGET_NVCC}, ${CMAKE_CUDA_COMPILER_VERSION})")
elseif(PUTGET_CUDA STREQUAL "ON")
  message(FATAL_ERROR "putget: PUTGET_CUDA=ON, but ${PUTGET_NO_CUDA}")
else()
  message(NOTICE "putget: CPU part only (${PUTGET_NO_CUDA})")
endif()

# Adds a folder of native whose kernels use instructions of one chip: machine code for that chip alone, no PTX.
function(putget_add_cuda_of_chip target folder architecture)
  if(NOT PUTGET_NVCC)
    return()
  endif()
  file(GLOB sources CONFIGURE_DEPENDS ${folder}/*.cu)
  set(objects ${target}_${architecture})
  add_library(${objects} OBJECT ${sources})
  set_target_properties(${objects} PROPERTIES
    CUDA_ARCHITECTURES ${architecture}-real
    CUDA_STANDARD 17
    CUDA_STANDARD_REQUIRED ON
    CUDA_VISIBILITY_PRESET hidden
    CUDA_RUNTIME_LIBRARY Static
    POSITION_INDEPENDENT_CODE ON)
  target_compile_definitions(${objects} PRIVATE $<TARGET_PROPERTY:${target},COMPILE_DEFINITIONS>)
  target_include_directories(${objects} PRIVATE native/include native)
  target_include_directories(${objects} SYSTEM PRIVATE ${PUTGET_CUDA_ROOT}/include)
  target_compile_options(${objects} PRIVATE -Xcompiler=-Wall,-Wextra --expt-relaxed-constexpr)
  if(PUTGET_WERROR)
    target_compile_options(${objects} PRIVATE -Werror=all-warnings)
  endif()
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:${objects}>)
endfunction()

# Adds a folder of native to `target`, if there is a compiler for it.
function(putget_add_cuda target folder)
  if(NOT PUTGET_NVCC)
    return()
  endif()
  file(GLOB sources CONFIGURE_DEPENDS ${folder}/*.cu ${folder}/*.cpp)
  target_sources(${target} PRIVATE ${sources})
  target_compile_definitions(${target} PRIVATE PUTGET_WITH_CUDA=1)
  target_include_directories(${target} SYSTEM PRIVATE ${PUTGET_CUDA_ROOT}/include)
  set_target_properties(${target} PROPERTIES
    CUDA_STANDARD 17
    CUDA_STANDARD_REQUIRED ON
    CUDA_VISIBILITY_PRESET hidden
    CUDA_RUNTIME_LIBRARY Static)
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra --expt-relaxed-constexpr>)
  if(PUTGET_WERROR)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>)
  endif()
  target_link_directories(${target} PRIVATE ${PUTGET_CUDA_LINK_DIR})
endfunction()
