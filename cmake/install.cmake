# What `cmake --install` puts where, and the package that find_package(Lockstep) finds.
include(CMakePackageConfigHelpers)

install(TARGETS lockstep EXPORT LockstepTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
if(LOCKSTEP_HAS_GLOO)
  install(TARGETS lockstep_gloo LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
install(FILES lockstep.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/lockstep)
foreach(folder ${LOCKSTEP_FOLDERS})
  install(DIRECTORY ${folder}/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/lockstep/${folder}
    FILES_MATCHING PATTERN "*.h" PATTERN "cpu" EXCLUDE PATTERN "mnist" EXCLUDE
    PATTERN "shm" EXCLUDE PATTERN "store" EXCLUDE PATTERN "hosts" EXCLUDE PATTERN "gloo" EXCLUDE
    PATTERN "launch" EXCLUDE PATTERN "checkpoints" EXCLUDE)
endforeach()

set(package ${CMAKE_INSTALL_LIBDIR}/cmake/Lockstep)
install(EXPORT LockstepTargets NAMESPACE lockstep:: DESTINATION ${package})
configure_package_config_file(cmake/LockstepConfig.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/LockstepConfig.cmake
  INSTALL_DESTINATION ${package})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/LockstepConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/LockstepConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/LockstepConfigVersion.cmake
  DESTINATION ${package})
