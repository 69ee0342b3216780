# What a user may switch, and the flags that all of our targets share.
option(FSDP2_BUILD_CLI "Build the fsdp2 binary (launcher and trainer)" ${PROJECT_IS_TOP_LEVEL})
option(FSDP2_BUILD_TESTS "Build the tests" ${PROJECT_IS_TOP_LEVEL})
option(FSDP2_BUILD_BENCHMARKS "Build the micro-benchmarks" OFF)
option(FSDP2_BUILD_FUZZERS "Build the libFuzzer targets; needs clang" OFF)
option(FSDP2_S3 "Checkpoints in s3:// buckets; needs libcurl" OFF)
option(FSDP2_CHECKS "Guard against silent errors of use; OFF only to measure what that costs" ON)
option(FSDP2_WERROR "Treat warnings as errors" OFF)
option(FSDP2_CI_CHECKS "Add formatting, lint, sanitizer and fuzz runs to the tests" OFF)
set(FSDP2_SANITIZE "" CACHE STRING "Sanitizers, e.g. address,undefined or thread")

if(PROJECT_IS_TOP_LEVEL AND NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
find_program(FSDP2_CCACHE ccache)
if(FSDP2_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${FSDP2_CCACHE})
endif()

function(fsdp2_target_defaults target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  set_target_properties(${target} PROPERTIES CXX_EXTENSIONS OFF)
  get_target_property(type ${target} TYPE)
  if(type STREQUAL EXECUTABLE)
    # The library's code model, so that the precompiled header serves executables too.
    set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
    target_compile_options(${target} PRIVATE -fPIC)
  endif()
  # -fpch-preprocess lets ccache cache files that use the precompiled header.
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic
    $<$<CXX_COMPILER_ID:GNU>:-fpch-preprocess>)
  if(FSDP2_WERROR)
    # GCC's flow-based warnings see overflows in std::string and in libtorch's containers that are not there, and
    # a libtorch newer than the oldest one supported deprecates names that the oldest needs: these stay warnings.
    target_compile_options(${target} PRIVATE -Werror -Wno-error=deprecated-declarations
      $<$<CXX_COMPILER_ID:GNU>:-Wno-error=stringop-overflow;-Wno-error=stringop-overread;-Wno-error=restrict;-Wno-error=maybe-uninitialized;-Wno-error=array-bounds>)
  endif()
  if(FSDP2_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${FSDP2_SANITIZE} -fno-omit-frame-pointer -g1)
    target_link_options(${target} PUBLIC -fsanitize=${FSDP2_SANITIZE})
  endif()
endfunction()
