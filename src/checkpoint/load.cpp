#include "checkpoint/digest.h"
#include "checkpoint/exchange.h"
#include "checkpoint/load_plan.h"
#include "checkpoint/load_report.h"

#include <fsdp2/dcp.h>

#include <c10/util/Exception.h>

namespace fsdp2::dcp {
namespace {

/// Stateful objects give way to what they want filled.
class StandIns {
 public:
  void replace(Value& value, const std::string& key, const Metadata& saved) {
    if (value.is<std::shared_ptr<Stateful>>()) {
      auto object = std::get<std::shared_ptr<Stateful>>(value.variant());
      std::vector<std::string> below;
      for (const StoredEntry& entry : saved.entries) {
        if (entry.key.size() > key.size() && is_below(entry.key, key)) {
          below.push_back(entry.key.substr(key.size() + 1));
        }
      }
      value = object->state_dict_to_load(below);
      objects_.emplace_back(&value, std::move(object));
    }
    if (!value.is_dict()) return;
    for (auto& [name, item] : value.dict()) {
      replace(item, c10::str(key, '.', name), saved);
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
  std::vector<std::pair<Value*, std::shared_ptr<Stateful>>> objects_;
};

}  // namespace

LoadReport load(StateDict& state, const std::string& folder, const LoadOptions& options) {
  torch::NoGradGuard no_grad;
  const Exchange exchange(options.process_group, "loading " + folder);
  StandIns stand_ins;
  std::optional<OpenCheckpoint> checkpoint;
  LoadPlan plan;
  int threads = 1;
  const LoadReport report = agreed_report(exchange, [&] {
    threads = thread_count(options.threads, exchange);
    OpenCheckpoint& opened = checkpoint.emplace(folder);
    for (auto& [key, value] : state) stand_ins.replace(value, key, opened.metadata);
    plan = plan_load(state, opened, options);
    check_missing(plan.report.missing, opened.keys(), plan.found > 0, options.allow_partial);
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

VerifyReport verify(const std::string& folder,
                    const std::function<void(uint64_t done, uint64_t all)>& progress) {
  OpenCheckpoint checkpoint(folder);
  const Metadata& metadata = checkpoint.metadata;
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
    checksums = read_checksums(checkpoint.folder, metadata);
    if (!checksums) return;
    const std::string path = files::join(checkpoint.folder, ".metadata");
    const std::string bytes = files::read_if_there(path).value_or("");
    TORCH_CHECK(files::digest_of(bytes.data(), bytes.size()) == checksums->metadata, path,
                " is damaged: it has other bytes than were saved");
  });
  report.has_checksums = checksums.has_value();
  uint64_t all = 0;
  for (const StoredEntry& entry : metadata.entries) all += entry.stored_bytes();
  for (const StoredEntry& entry : metadata.entries) {
    for (const StoredChunk& chunk : entry.chunks) {
      if (chunk.place.file.empty()) continue;
      note([&] {
        const files::Readable& file = checkpoint.files.at(chunk.place.file);
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
