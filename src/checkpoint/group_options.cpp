#include "checkpoint/group_options.h"

#include <c10/core/TensorImpl.h>

#include <map>
#include <mutex>

namespace fsdp2::dcp {
namespace {

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

struct KeptGroups {
  std::mutex mutex;
  std::map<const void*, std::pair<WeakTensor, StateDict>> groups;
};
KeptGroups& kept_groups() {
  static auto* kept = new KeptGroups();
  return *kept;
}

}  // namespace

void keep_group_options(const torch::Tensor& first_parameter, StateDict options) {
  KeptGroups& kept = kept_groups();
  const std::lock_guard lock(kept.mutex);
  std::erase_if(kept.groups, [](const auto& group) { return group.second.first.expired(); });
  kept.groups.insert_or_assign(
      first_parameter.unsafeGetTensorImpl(),
      std::pair(WeakTensor(first_parameter.getIntrusivePtr()), std::move(options)));
}

StateDict kept_group_options(const torch::Tensor& first_parameter) {
  KeptGroups& kept = kept_groups();
  const std::lock_guard lock(kept.mutex);
  const auto place = kept.groups.find(first_parameter.unsafeGetTensorImpl());
  if (place == kept.groups.end() || place->second.first.expired()) return {};
  return place->second.second;
}

}  // namespace fsdp2::dcp
