#include "fsdp/wrapped_modules.h"

namespace fsdp2::fsdp {

WrappedModules& wrapped_modules() {
  static auto* modules = new WrappedModules;
  return *modules;
}

}  // namespace fsdp2::fsdp
