# libtorch is found through CMAKE_PREFIX_PATH or Torch_DIR; ./dev sets it from an importable pip torch.
if(NOT DEFINED CAFFE2_USE_CUDNN)
  set(CAFFE2_USE_CUDNN OFF)
endif()
find_package(Torch REQUIRED)
find_package(nlohmann_json REQUIRED)
if(NOT PROJECT_IS_TOP_LEVEL)
  # A project that has us as a subdirectory links libtorch through us, from its own folder.
  get_directory_property(imported IMPORTED_TARGETS)
  set_target_properties(${imported} PROPERTIES IMPORTED_GLOBAL ON)
endif()
if(FSDP2_BUILD_TESTS)
  set(FSDP2_PYTHON "" CACHE FILEPATH "A Python that has torch; without one, tests against PyTorch are skipped")
endif()
if(FSDP2_BUILD_CLI)
  find_package(CLI11 REQUIRED)
endif()

if(FSDP2_BUILD_BENCHMARKS)
  find_package(benchmark REQUIRED)
endif()

# Checkpoints in buckets need a libcurl that signs for S3.
function(fsdp2_storages target)
  if(FSDP2_S3)
    find_package(CURL 7.88 REQUIRED)
    target_link_libraries(${target} PRIVATE CURL::libcurl)
    set(other src/checkpoint/no_s3.cpp)
  else()
    set(other src/checkpoint/s3_request.cpp src/checkpoint/s3_storage.cpp)
  endif()
  set_source_files_properties(${other} PROPERTIES HEADER_FILE_ONLY TRUE)
endfunction()

# The pip wheel exports gloo's symbols but not gloo's headers; ProcessGroupGloo.hpp needs only a handful of
# declarations, which src/comm/gloo_declarations has. Real headers win when they are found.
function(fsdp2_comm_backends target)
  find_path(FSDP2_GLOO_INCLUDE gloo/rendezvous/store.h HINTS ${TORCH_INCLUDE_DIRS} NO_DEFAULT_PATH)
  if(FSDP2_GLOO_INCLUDE)
    target_include_directories(${target} SYSTEM PRIVATE ${FSDP2_GLOO_INCLUDE})
  else()
    target_include_directories(${target} SYSTEM PRIVATE ${PROJECT_SOURCE_DIR}/src/comm/gloo_declarations)
  endif()

  # NCCL comes with a CUDA libtorch; its header lies next to the wheel or in the toolkit.
  set(nccl src/comm/backend_nccl.cpp)
  set(no_nccl src/comm/no_nccl.cpp)
  if(TORCH_CUDA_LIBRARIES)
    find_path(FSDP2_NCCL_INCLUDE nccl.h HINTS ${TORCH_INCLUDE_DIRS} ${CUDA_INCLUDE_DIRS}
      ${TORCH_INSTALL_PREFIX}/../nvidia/nccl/include)
  endif()
  if(FSDP2_NCCL_INCLUDE)
    target_include_directories(${target} SYSTEM PRIVATE ${FSDP2_NCCL_INCLUDE})
    set_source_files_properties(${no_nccl} PROPERTIES HEADER_FILE_ONLY TRUE)
  else()
    set_source_files_properties(${nccl} PROPERTIES HEADER_FILE_ONLY TRUE)
  endif()
endfunction()
