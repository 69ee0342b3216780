# Against PyTorch in Python. Without a Python that has torch there is nothing to compare with.
if(FSDP2_PYTHON)
  add_test(NAME parity/step
    COMMAND ${FSDP2_PYTHON} ${CMAKE_CURRENT_SOURCE_DIR}/parity/step_parity.py $<TARGET_FILE:fsdp2_cli>)
  add_test(NAME parity/safetensors
    COMMAND ${FSDP2_PYTHON} ${CMAKE_CURRENT_SOURCE_DIR}/parity/safetensors_parity.py $<TARGET_FILE:fsdp2_cli>)
  add_test(NAME parity/dcp COMMAND ${FSDP2_PYTHON} ${CMAKE_CURRENT_SOURCE_DIR}/parity/dcp_parity.py
    $<TARGET_FILE:fsdp2_cli> $<TARGET_FILE:checkpoint_worker>)
  add_executable(hf_worker ${CMAKE_CURRENT_SOURCE_DIR}/parity/hf_worker.cpp)
  fsdp2_target_defaults(hf_worker)
  target_link_libraries(hf_worker PRIVATE fsdp2_app)
  target_precompile_headers(hf_worker REUSE_FROM fsdp2)
  add_test(NAME parity/hf COMMAND ${FSDP2_PYTHON} ${CMAKE_CURRENT_SOURCE_DIR}/parity/hf_parity.py
    $<TARGET_FILE:fsdp2_cli> $<TARGET_FILE:hf_worker>)
  add_test(NAME parity/dcp_files COMMAND ${FSDP2_PYTHON} ${CMAKE_CURRENT_SOURCE_DIR}/parity/dcp_files.py
    $<TARGET_FILE:fsdp2_cli> $<TARGET_FILE:checkpoint_worker>)
  add_test(NAME parity/behaviours
    COMMAND ${FSDP2_PYTHON} ${PROJECT_SOURCE_DIR}/bench/parity.py $<TARGET_FILE:fsdp2_cli> --quick)
  if(FSDP2_S3)
    add_test(NAME parity/s3 COMMAND ${FSDP2_PYTHON} ${CMAKE_CURRENT_SOURCE_DIR}/parity/s3_parity.py
      $<TARGET_FILE:fsdp2_cli> $<TARGET_FILE:checkpoint_worker>)
    set(s3 parity/s3)
  endif()
  set_tests_properties(${s3} parity/step parity/safetensors parity/dcp parity/dcp_files parity/hf parity/behaviours PROPERTIES TIMEOUT 180 LABELS parity
    SKIP_RETURN_CODE 77 ENVIRONMENT "OMP_NUM_THREADS=1;PYTHONDONTWRITEBYTECODE=1")
endif()
