#include "checkpoint/load_plan.h"
#include "checkpoint/near_names.h"

#include <fsdp2/dcp.h>

#include <c10/util/Exception.h>

namespace fsdp2::dcp {

struct Reader::Impl {
  explicit Impl(const std::string& folder) : checkpoint(folder) {}

  OpenCheckpoint checkpoint;
};

Reader::Reader(const std::string& folder) : impl_(std::make_unique<Impl>(folder)) {}
Reader::~Reader() = default;
Reader::Reader(Reader&&) noexcept = default;
Reader& Reader::operator=(Reader&&) noexcept = default;

const Metadata& Reader::metadata() const { return impl_->checkpoint.metadata; }
std::vector<std::string> Reader::keys() const { return impl_->checkpoint.keys(); }

Value Reader::load_one(const std::string& key) const {
  const StoredEntry* entry = metadata().find(key);
  TORCH_CHECK_VALUE(entry != nullptr, impl_->checkpoint.folder, " has no ", key,
                    near_names(key, keys()));
  return read_entry(*entry, impl_->checkpoint);
}

StateDict Reader::load_everything() const {
  StateDict state;
  for (const StoredEntry& entry : metadata().entries) {
    const bool nested = !entry.path.empty() && std::holds_alternative<std::string>(entry.path[0]);
    state[nested ? std::get<std::string>(entry.path[0]) : entry.key];
  }
  LoadPlan plan = plan_load(state, impl_->checkpoint, {});
  run(plan.tasks, 1);
  for (auto& [to, value] : plan.values) *to = std::move(value);
  return state;
}

StateDict load_everything(const std::string& folder) { return Reader(folder).load_everything(); }

Value load_one(const std::string& folder, const std::string& key) {
  return Reader(folder).load_one(key);
}

}  // namespace fsdp2::dcp
