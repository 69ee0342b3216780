# `cmake --install` gives a tree that find_package(fsdp2) uses: the library, its headers, the binary.
include(CMakePackageConfigHelpers)
set(fsdp2_cmake_dir ${CMAKE_INSTALL_LIBDIR}/cmake/fsdp2)

install(TARGETS fsdp2 EXPORT fsdp2Targets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/fsdp2 DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT fsdp2Targets NAMESPACE fsdp2:: DESTINATION ${fsdp2_cmake_dir})
if(FSDP2_BUILD_CLI)
  install(TARGETS fsdp2_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/fsdp2Config.cmake.in
  ${PROJECT_BINARY_DIR}/fsdp2Config.cmake INSTALL_DESTINATION ${fsdp2_cmake_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/fsdp2ConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/fsdp2Config.cmake ${PROJECT_BINARY_DIR}/fsdp2ConfigVersion.cmake
  DESTINATION ${fsdp2_cmake_dir})
