# The two ways to use fsdp2 from another project, each configured, built and run.
set(prefix ${CMAKE_CURRENT_BINARY_DIR}/consumer/prefix)
add_test(NAME consumer/install
  COMMAND ${CMAKE_COMMAND} --install ${PROJECT_BINARY_DIR} --prefix ${prefix})
set_tests_properties(consumer/install PROPERTIES FIXTURES_SETUP consumer_prefix)

function(fsdp2_consumer_test name)
  add_test(NAME consumer/${name} COMMAND ${CMAKE_CTEST_COMMAND}
    --build-and-test ${CMAKE_CURRENT_SOURCE_DIR}/consumer ${CMAKE_CURRENT_BINARY_DIR}/consumer/${name}
    --build-noclean --build-generator ${CMAKE_GENERATOR} --build-makeprogram ${CMAKE_MAKE_PROGRAM}
    --build-options -DCMAKE_CXX_COMPILER=${CMAKE_CXX_COMPILER}
      -DCMAKE_CXX_COMPILER_LAUNCHER=${CMAKE_CXX_COMPILER_LAUNCHER} ${ARGN}
    --test-command consumer)
  set_tests_properties(consumer/${name} PROPERTIES TIMEOUT 1800 PASS_REGULAR_EXPRESSION "no mesh"
    ENVIRONMENT "CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime")
endfunction()

# Without optimisation: what is tested is that it builds and links.
fsdp2_consumer_test(find_package -DCMAKE_PREFIX_PATH=${prefix} -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O0)
set_tests_properties(consumer/find_package PROPERTIES FIXTURES_REQUIRED consumer_prefix)
fsdp2_consumer_test(add_subdirectory -DFSDP2_SOURCE_DIR=${PROJECT_SOURCE_DIR} -DTorch_DIR=${Torch_DIR}
  -DCMAKE_UNITY_BUILD=ON -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O0)
