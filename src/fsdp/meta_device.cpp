#include "dispatch/replace_data.h"
#include "fsdp/schedule.h"
#include "fsdp/wrapped_modules.h"
#include "mesh/mesh_impl.h"

#include <fsdp2/meta_device.h>

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>
#include <torch/utils.h>

#include <algorithm>
#include <limits>
#include <unordered_set>

namespace fsdp2 {
namespace {

using fsdp::ShardWrites;

// The mode key that torch keeps for tests of modes; it comes before everything that makes tensors.
constexpr auto kMode = c10::DispatchKey::TESTING_ONLY_GenericMode;

void on_meta(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard guard(kMode);
  const auto& arguments = op.schema().arguments();
  const size_t base = stack->size() - arguments.size();
  bool makes = true;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = (*stack)[base + i];
    makes = makes && !(value.isTensor() && value.toTensor().defined()) && !value.isTensorList();
  }
  for (size_t i = 0; makes && i < arguments.size(); ++i) {
    if (arguments[i].name() == "device") (*stack)[base + i] = c10::Device(c10::kMeta);
    if (arguments[i].name() == "pin_memory") (*stack)[base + i] = c10::IValue();
  }
  op.callBoxed(*stack);
}

void register_mode() {
  static auto* library = [] {
    auto* made = new torch::Library(torch::Library::IMPL, "_", kMode, __FILE__, __LINE__);
    made->fallback(torch::CppFunction::makeFromBoxedFunction<&on_meta>());
    return made;
  }();  // for the life of the process
  static_cast<void>(library);
}

using Groups = std::vector<std::shared_ptr<ParamGroup>>;

/// The groups that parameters below are in, in the order of parameters().
Groups groups_below(const torch::nn::Module& module) {
  Groups groups;
  for (const auto& parameter : module.parameters()) {
    const auto observer = std::dynamic_pointer_cast<ShardWrites>(write_observer(parameter));
    auto group = observer ? observer->group.lock() : nullptr;
    if (group && std::find(groups.begin(), groups.end(), group) == groups.end())
      groups.push_back(std::move(group));
  }
  return groups;
}

/// A buffer that has memory and no values.
struct EmptyBuffer {
  std::weak_ptr<torch::nn::Module> owner;
  std::string key, name;
  const void* storage;
  uint32_t version;

  bool still_empty() const {
    const auto module = owner.lock();
    if (!module) return false;
    const torch::Tensor* buffer = module->named_buffers(/*recurse=*/false).find(key);
    return buffer && buffer->defined() && buffer->numel() > 0 &&
           buffer->storage().unsafeGetStorageImpl() == storage && buffer->_version() == version;
  }
};

std::vector<EmptyBuffer> materialise_buffers(torch::nn::Module& module, c10::Device device) {
  std::vector<EmptyBuffer> made;
  for (const auto& item : module.named_modules()) {
    for (const auto& entry : item.value()->named_buffers(/*recurse=*/false)) {
      const torch::Tensor& buffer = entry.value();
      if (!buffer.defined() || !buffer.is_meta()) continue;
      dispatch::replace_data(buffer, at::empty_like(buffer, at::TensorOptions().device(device)));
      const std::string name = item.key().empty() ? entry.key() : item.key() + "." + entry.key();
      made.push_back({item.value(), entry.key(), name, buffer.storage().unsafeGetStorageImpl(),
                      static_cast<uint32_t>(buffer._version())});
    }
  }
  return made;
}

void check_buffers(const std::vector<EmptyBuffer>& buffers) {
  std::vector<std::string> names;
  for (const EmptyBuffer& buffer : buffers) {
    if (buffer.still_empty()) names.push_back(buffer.name);
  }
  TORCH_CHECK(names.empty(), "buffers '", c10::Join("', '", names), "'",
              " were given memory by to_empty() but no values: initialise them (init_weights, "
              "reset_parameters, or write them) before using the module");
}

/// The same on all ranks.
uint64_t agree(uint64_t seed, const Groups& groups) {
  std::vector<DeviceMesh> meshes;
  for (const auto& group : groups) {
    const DeviceMesh& mesh = group->mesh();
    if (std::find(meshes.begin(), meshes.end(), mesh) != meshes.end()) continue;
    meshes.push_back(mesh);
    torch::Tensor value =
        at::full({1}, static_cast<int64_t>(seed), at::TensorOptions().dtype(torch::kLong));
    value = value.to(mesh.device());
    broadcast_from_first(value, mesh, "the seed of init_weights");
    seed = static_cast<uint64_t>(value.item<int64_t>());
  }
  return seed;
}

/// Default generators, put back when the scope ends.
class SeededGenerators {
 public:
  SeededGenerators(uint64_t seed, const Groups& groups) {
    keep(at::globalContext().defaultGenerator(c10::kCPU));
    for (const auto& group : groups) {
      if (!group->mesh().device().is_cuda()) continue;
      keep(at::globalContext().defaultGenerator(group->mesh().device()));
      break;
    }
    for (auto& [generator, state] : kept_) {
      const std::lock_guard lock(generator.mutex());
      generator.set_current_seed(seed);
    }
  }
  SeededGenerators(const SeededGenerators&) = delete;
  SeededGenerators& operator=(const SeededGenerators&) = delete;
  ~SeededGenerators() {
    for (auto& [generator, state] : kept_) {
      const std::lock_guard lock(generator.mutex());
      generator.set_state(state);
    }
  }

 private:
  void keep(at::Generator generator) {
    const std::lock_guard lock(generator.mutex());
    kept_.emplace_back(generator, generator.get_state());
  }
  std::vector<std::pair<at::Generator, torch::Tensor>> kept_;
};

/// Members can be written to within.
class Initialising {
 public:
  explicit Initialising(const Groups& groups) : groups_(groups) {
    for (const auto& group : groups_) group->initialising = true;
  }
  Initialising(const Initialising&) = delete;
  Initialising& operator=(const Initialising&) = delete;
  ~Initialising() {
    for (const auto& group : groups_) group->initialising = false;
  }

 private:
  const Groups& groups_;
};

}  // namespace

struct MetaDeviceGuard::Impl {
  c10::impl::IncludeDispatchKeyGuard guard{kMode};
};

MetaDeviceGuard::MetaDeviceGuard() {
  register_mode();
  impl_ = std::make_unique<Impl>();
}

MetaDeviceGuard::~MetaDeviceGuard() = default;

void to_empty(torch::nn::Module& module, c10::Device device) {
  at::NoGradGuard no_grad;
  const Groups groups = groups_below(module);
  for (const auto& group : groups) {
    const c10::Device wanted = group->policy.shard_device;
    TORCH_CHECK(wanted.type() == device.type() && (!device.has_index() || wanted == device),
                "to_empty: parameter '", group->params().front().layout.name, "' was sharded for ",
                wanted, ", not for ", device);
  }
  for (const auto& item : module.named_parameters()) {
    const torch::Tensor& parameter = item.value();
    const auto observer = std::dynamic_pointer_cast<ShardWrites>(write_observer(parameter));
    if (observer) {
      if (auto group = observer->group.lock()) group->materialise(observer->index);
    } else if (parameter.is_meta()) {
      dispatch::replace_data(parameter,
                             at::empty_like(parameter, at::TensorOptions().device(device)));
    }
  }
  const std::vector<EmptyBuffer> buffers = materialise_buffers(module, device);
  if (buffers.empty() || groups.empty()) return;
  std::unordered_set<Schedule*> told;
  for (const auto& group : groups) {
    if (told.insert(group->schedule.get()).second)
      group->schedule->check_before_use([buffers] { check_buffers(buffers); });
  }
}

void init_weights(torch::nn::Module& module, const std::function<void(torch::nn::Module&)>& init,
                  std::optional<uint64_t> seed) {
  at::NoGradGuard no_grad;
  const Groups groups = groups_below(module);
  const uint64_t drawn =
      seed ? *seed
           : static_cast<uint64_t>(
                 torch::randint(std::numeric_limits<int64_t>::max(), {1}, torch::kLong)
                     .item<int64_t>());
  const SeededGenerators generators(agree(drawn, groups), groups);
  const Initialising initialising(groups);
  for (const auto& below : module.modules()) init(*below);
}

}  // namespace fsdp2
