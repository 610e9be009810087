# Looks for oneDNN by its header and its library. Its own CMake package is not asked: where oneDNN was built for GPUs
# too, as Debian's is, that package demands OpenCL's headers, which nothing here needs.
# Sets LOCKSTEP_HAS_ONEDNN and, where that is true, makes the target `onednn`.
set(LOCKSTEP_HAS_ONEDNN OFF)
if(NOT LOCKSTEP_ONEDNN)
  message(STATUS "Lockstep without oneDNN, products and convolutions by Eigen: LOCKSTEP_ONEDNN is off")
  return()
endif()

# Sets `reason` to why the oneDNN that was found cannot serve, or to nothing.
function(lockstep_check_onednn)
  set(headers ${ONEDNN_INCLUDE}/oneapi/dnnl)
  if(NOT ONEDNN_INCLUDE OR NOT ONEDNN_LIBRARY)
    lockstep_package(oneapi/dnnl/dnnl.hpp packages)
    set(reason "none was found; it is in ${packages}" PARENT_SCOPE)
    return()
  endif()
  file(STRINGS ${headers}/dnnl_version.h version REGEX "define DNNL_VERSION_MAJOR")
  file(STRINGS ${headers}/dnnl_config.h runtime REGEX "define DNNL_CPU_RUNTIME ")
  string(REGEX REPLACE ".* " "" version "${version}")
  string(REGEX REPLACE ".*DNNL_RUNTIME_" "" runtime "${runtime}")
  if(NOT version MATCHES "^[23]$")
    set(reason "${headers} is of version ${version}, and Lockstep is written for 2 and 3" PARENT_SCOPE)
    return()
  elseif(NOT runtime MATCHES "^(OMP|SEQ)$")
    set(reason "${ONEDNN_LIBRARY} runs on ${runtime}, and Lockstep needs one that runs on OpenMP (OMP) or sequentially (SEQ)"
      PARENT_SCOPE)
    return()
  endif()
  try_run(code compiled ${CMAKE_CURRENT_BINARY_DIR} ${CMAKE_CURRENT_SOURCE_DIR}/cmake/onednn_probe.cpp
    NO_CACHE CMAKE_FLAGS -DINCLUDE_DIRECTORIES=${ONEDNN_INCLUDE} LINK_LIBRARIES ${ONEDNN_LIBRARY}
    RUN_OUTPUT_VARIABLE output)
  if(NOT compiled)
    set(reason "no program can be linked with ${ONEDNN_LIBRARY}; see CMakeFiles/CMakeError.log" PARENT_SCOPE)
  elseif(NOT code EQUAL 0)
    set(reason "${ONEDNN_LIBRARY} and the header in ${headers} do not belong together: ${output}" PARENT_SCOPE)
  else()
    set(reason "" PARENT_SCOPE)
    message(STATUS "Lockstep with oneDNN ${output}: ${ONEDNN_LIBRARY}")
  endif()
endfunction()

find_path(ONEDNN_INCLUDE oneapi/dnnl/dnnl.hpp)
find_library(ONEDNN_LIBRARY dnnl)
mark_as_advanced(ONEDNN_INCLUDE ONEDNN_LIBRARY)
lockstep_check_onednn()
if(reason)
  message(STATUS "Lockstep without oneDNN, products and convolutions by Eigen: ${reason}")
else()
  set(LOCKSTEP_HAS_ONEDNN ON)
  add_library(onednn UNKNOWN IMPORTED)
  set_target_properties(onednn PROPERTIES
    IMPORTED_LOCATION ${ONEDNN_LIBRARY} INTERFACE_INCLUDE_DIRECTORIES ${ONEDNN_INCLUDE})
endif()
