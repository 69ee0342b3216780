#include "recompute/surroundings.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <mutex>

namespace fsdp2::recompute {
namespace {

std::vector<at::Device> devices_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Device> devices = {at::Device(at::kCPU)};
  const auto add = [&](at::Device device) {
    const bool known = std::find(devices.begin(), devices.end(), device) != devices.end();
    if (!known && at::isAccelerator(device.type())) devices.push_back(device);
  };
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined()) add(tensor.device());
  }
  if (const auto accelerator = at::getAccelerator(/*checked=*/false)) {
    const at::Device current = c10::impl::VirtualGuardImpl(*accelerator).getDevice();
    const auto& hooks = at::globalContext().getAcceleratorHooksInterface(accelerator);
    if (hooks.hasPrimaryContext(current.index())) add(current);
  }
  return devices;
}

at::Tensor state_of(at::Generator generator) {
  std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

}  // namespace

Surroundings::Surroundings(const std::vector<at::Tensor>& tensors, bool random_states)
    : autocast_cache_(at::autocast::is_autocast_cache_enabled()) {
  for (const at::Device device : devices_of(tensors)) {
    if (random_states) {
      const at::Generator generator = at::globalContext().defaultGenerator(device);
      random_.push_back({generator, state_of(generator)});
    }
    const at::DeviceType type = device.type();
    autocast_.push_back(
        {type, at::autocast::is_autocast_enabled(type), at::autocast::get_autocast_dtype(type)});
  }
}

Surroundings::Surroundings(const Surroundings& like, int)
    : autocast_cache_(at::autocast::is_autocast_cache_enabled()) {
  for (const Random& random : like.random_) {
    random_.push_back({random.generator, state_of(random.generator)});
  }
  for (const Autocast& autocast : like.autocast_) {
    autocast_.push_back({autocast.device, at::autocast::is_autocast_enabled(autocast.device),
                         at::autocast::get_autocast_dtype(autocast.device)});
  }
}

std::unique_ptr<Surroundings> Surroundings::of_now() const {
  return std::unique_ptr<Surroundings>(new Surroundings(*this, 0));
}

void Surroundings::restore() const {
  for (const Random& random : random_) {
    at::Generator generator = random.generator;
    std::lock_guard lock(generator.mutex());
    generator.set_state(random.state);
  }
  for (const Autocast& autocast : autocast_) {
    at::autocast::set_autocast_enabled(autocast.device, autocast.enabled);
    at::autocast::set_autocast_dtype(autocast.device, autocast.dtype);
  }
  at::autocast::set_autocast_cache_enabled(autocast_cache_);
}

Surroundings::Restored::Restored(const Surroundings& wanted) : before_(wanted, 0) {
  wanted.restore();
  at::autocast::increment_nesting();
}

Surroundings::Restored::~Restored() {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  before_.restore();
}

}  // namespace fsdp2::recompute
