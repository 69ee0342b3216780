#include "checkpoint/digest.h"
#include "checkpoint/exchange.h"
#include "checkpoint/load_plan.h"
#include "checkpoint/load_report.h"
#include "checkpoint/near_names.h"

#include <fsdp2/dcp.h>

#include <c10/util/Exception.h>

#include <filesystem>

namespace fsdp2::dcp {
namespace {

std::vector<std::string> keys_of(const Metadata& metadata) {
  std::vector<std::string> keys;
  keys.reserve(metadata.entries.size());
  for (const StoredEntry& entry : metadata.entries) keys.push_back(entry.key);
  return keys;
}

/// Stateful objects give way to what they want filled.
class StandIns {
 public:
  explicit StandIns(std::string folder) : folder_(std::move(folder)) {}

  void replace(Value& value, const std::string& key) {
    if (value.is<std::shared_ptr<Stateful>>()) {
      auto object = std::get<std::shared_ptr<Stateful>>(value.variant());
      if (!saved_) saved_ = keys_of(read_metadata(folder_));
      std::vector<std::string> below;
      for (const std::string& name : *saved_) {
        if (name.size() > key.size() && is_below(name, key)) {
          below.push_back(name.substr(key.size() + 1));
        }
      }
      value = object->state_dict_to_load(below);
      objects_.emplace_back(&value, std::move(object));
    }
    if (!value.is_dict()) return;
    for (auto& [name, item] : value.dict()) {
      replace(item, c10::str(key, '.', name));
    }
  }
  void hand_out() const {
    for (auto& [value, object] : objects_) object->load_state_dict(value->dict());
  }
  /// Back to how it was.
  ~StandIns() {
    for (auto place = objects_.rbegin(); place != objects_.rend(); ++place) {
      *place->first = place->second;
    }
  }

 private:
  std::string folder_;
  std::optional<std::vector<std::string>> saved_;
  std::vector<std::pair<Value*, std::shared_ptr<Stateful>>> objects_;
};

}  // namespace

LoadReport load(StateDict& state, const std::string& folder, const LoadOptions& options) {
  torch::NoGradGuard no_grad;
  const Exchange exchange(options.process_group, "loading " + folder);
  StandIns stand_ins(folder);
  LoadPlan plan;
  int threads = 1;
  const LoadReport report = agreed_report(exchange, [&] {
    threads = thread_count(options.threads, exchange);
    for (auto& [key, value] : state) stand_ins.replace(value, key);
    plan = plan_load(state, folder, options);
    check_missing(plan.report.missing, keys_of(plan.metadata), plan.found > 0,
                  options.allow_partial);
    return plan.report;
  });
  exchange.agree([&] {
    for (const torch::Tensor& tensor : plan.written) announce_write(tensor);
    try {
      run(plan.tasks, threads);
    } catch (const c10::Error& error) {
      TORCH_CHECK(false, error.what_without_backtrace(),
                  "; the state is undefined: some of it may have been loaded");
    }
  });
  for (auto& [to, value] : plan.values) *to = std::move(value);
  stand_ins.hand_out();
  return report;
}

StateDict load_everything(const std::string& folder) {
  Metadata metadata = read_metadata(folder);
  StateDict state;
  for (const StoredEntry& entry : metadata.entries) {
    const bool nested = !entry.path.empty() && std::holds_alternative<std::string>(entry.path[0]);
    state[nested ? std::get<std::string>(entry.path[0]) : entry.key];
  }
  LoadPlan plan = plan_load(state, folder, std::move(metadata), {});
  run(plan.tasks, 1);
  for (auto& [to, value] : plan.values) *to = std::move(value);
  return state;
}

Value load_one(const std::string& folder, const std::string& key) {
  Metadata metadata = read_metadata(folder);
  TORCH_CHECK_VALUE(metadata.find(key) != nullptr, folder, " has no ", key,
                    near_names(key, keys_of(metadata)));
  StateDict state = {{key, None{}}};
  LoadPlan plan = plan_load(state, folder, std::move(metadata), {});
  run(plan.tasks, 1);
  return std::move(plan.values.at(0).value);
}

VerifyReport verify(const std::string& folder,
                    const std::function<void(uint64_t done, uint64_t all)>& progress) {
  const Metadata metadata = read_metadata(folder);
  VerifyReport report;
  const auto note = [&](const auto& check) {
    try {
      check();
    } catch (const c10::Error& error) {
      report.problems.emplace_back(error.what_without_backtrace());
    }
  };
  std::optional<Checksums> checksums;
  note([&] {
    checksums = read_checksums(folder, metadata);
    if (!checksums) return;
    const auto path = (std::filesystem::path(folder) / ".metadata").string();
    const std::string bytes = files::read_all(path);
    TORCH_CHECK(files::digest_of(bytes.data(), bytes.size()) == checksums->metadata, path,
                " is damaged: it has other bytes than were saved");
  });
  report.has_checksums = checksums.has_value();
  OpenFiles files(folder);
  uint64_t all = 0;
  for (const StoredEntry& entry : metadata.entries) all += entry.stored_bytes();
  for (const StoredEntry& entry : metadata.entries) {
    for (const StoredChunk& chunk : entry.chunks) {
      if (chunk.place.file.empty()) continue;
      note([&] {
        const files::ReadFile& file = files.at(chunk.place.file);
        if (checksums) check_item(file, chunk.place, *checksums);
        if (entry.is_tensor) {
          read_stored_tensor(file, chunk.place.offset, chunk.place.length);
        } else {
          read_object(file, chunk.place.offset, chunk.place.length);
        }
      });
      ++report.items;
      report.bytes += chunk.place.length;
      if (progress) progress(report.bytes, all);
    }
  }
  return report;
}

}  // namespace fsdp2::dcp
