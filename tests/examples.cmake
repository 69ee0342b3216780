# The examples, built as part of this project and run on two ranks.
function(fsdp2_example_test name pattern)
  add_subdirectory(${PROJECT_SOURCE_DIR}/examples/${name} ${CMAKE_CURRENT_BINARY_DIR}/examples/${name})
  fsdp2_target_defaults(${name})
  target_precompile_headers(${name} REUSE_FROM fsdp2)
  add_test(NAME examples/${name} COMMAND $<TARGET_FILE:fsdp2_cli> run -n 2 -- $<TARGET_FILE:${name}> ${ARGN})
  set_tests_properties(examples/${name} PROPERTIES TIMEOUT 60 LABELS examples PASS_REGULAR_EXPRESSION "${pattern}"
    ENVIRONMENT "OMP_NUM_THREADS=1")
endfunction()

fsdp2_example_test(01_fully_shard "step 200 loss 0\\.[01].*this rank holds \\[32, 16\\]")
fsdp2_example_test(02_train_loop "step 150 accuracy 0\\.[6-9]" ${CMAKE_CURRENT_BINARY_DIR}/examples/weights.safetensors)
