# Imported targets for the torch package of SLICE_PYTHON: slice_torch::c10 and slice_torch::torch_cpu.
#
# find_package(Torch) is not used: with a CUDA wheel it wants nvcc. The executor links libtorch_cpu alone; a CUDA
# backend is a library of its own, loaded at run time.
set(slice_torch_python "${SLICE_PYTHON}")
if(NOT slice_torch_python)
  file(GLOB candidates "$ENV{HOME}/.cache/slicescheduler/venv-*/bin/python")
  set(newest 0)
  foreach(candidate ${candidates})
    file(TIMESTAMP ${candidate} time "%s")
    if(time GREATER newest)
      set(newest ${time})
      set(slice_torch_python ${candidate})
    endif()
  endforeach()
endif()
if(NOT slice_torch_python)
  set(slice_torch_python python3)
endif()
execute_process(
  COMMAND ${slice_torch_python} -c
          "import importlib.util as u, os; s = u.find_spec('torch'); print(os.path.dirname(s.origin) if s else '')"
  OUTPUT_VARIABLE slice_torch_root OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(NOT slice_torch_root OR NOT EXISTS ${slice_torch_root}/lib/libtorch_cpu.so)
  message(FATAL_ERROR
    "SLICE_WITH_TORCH is ON, but ${slice_torch_python} has no torch package. Point SLICE_PYTHON at the interpreter of "
    "an environment that has it (pip install -r torch_plugin/requirements.txt), or configure with -DSLICE_WITH_TORCH=OFF "
    "to build everything but slice-executor.")
endif()
file(READ ${slice_torch_root}/version.py slice_torch_version_py)
string(REGEX MATCH "__version__ = '([^']*)'" _ "${slice_torch_version_py}")
set(SLICE_TORCH_VERSION ${CMAKE_MATCH_1})
message(STATUS "torch ${SLICE_TORCH_VERSION} from ${slice_torch_root}")

foreach(library c10 torch_cpu)
  add_library(slice_torch::${library} SHARED IMPORTED GLOBAL)
  set_target_properties(slice_torch::${library} PROPERTIES
    IMPORTED_LOCATION ${slice_torch_root}/lib/lib${library}.so)
endforeach()
# Only torch's own headers: the package's include directory also holds an old protobuf's, which would hide the system's.
set(slice_torch_include ${CMAKE_BINARY_DIR}/torch_include)
file(MAKE_DIRECTORY ${slice_torch_include})
foreach(folder ATen c10 torch)
  file(CREATE_LINK ${slice_torch_root}/include/${folder} ${slice_torch_include}/${folder} SYMBOLIC)
endforeach()
target_include_directories(slice_torch::c10 SYSTEM INTERFACE ${slice_torch_include})
target_link_libraries(slice_torch::torch_cpu INTERFACE slice_torch::c10)
# The wheel's libraries find their own dependencies through their RUNPATH; the linker need not.
target_link_options(slice_torch::torch_cpu INTERFACE -Wl,--allow-shlib-undefined)
