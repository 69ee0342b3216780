#pragma once

// What an error says.

#include <c10/util/Exception.h>

#include <exception>
#include <functional>
#include <gmock/gmock.h>
#include <string>

namespace fsdp2::testing {

/// The message of what `run` throws; "" if it throws nothing.
inline std::string error_of(const std::function<void()>& run) {
  try {
    run();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

}  // namespace fsdp2::testing
