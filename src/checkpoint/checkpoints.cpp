#include "checkpoint/storage.h"

#include <fsdp2/dcp_checkpoints.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <charconv>

namespace fsdp2::dcp {
namespace {

constexpr std::string_view kPrefix = "step_";
constexpr const char* kLatest = "latest";

/// -1 if that is no step's folder.
int64_t step_of(const std::string& name) {
  if (!name.starts_with(kPrefix)) return -1;
  int64_t step = -1;
  const char* const end = name.data() + name.size();
  const auto [stop, error] = std::from_chars(name.data() + kPrefix.size(), end, step);
  return error == std::errc() && stop == end ? step : -1;
}

bool is_complete(const std::string& folder) {
  return files::storage_of(folder).size(files::join(folder, ".metadata")).has_value();
}

/// First what makes it a checkpoint, so that half of one is never taken for one.
void remove_checkpoint(const std::string& folder) {
  files::storage_of(folder).remove(files::join(folder, ".metadata"));
  files::storage_of(folder).remove_folder(folder);
}

std::vector<int64_t> steps_in(const std::string& root, bool complete) {
  std::vector<int64_t> steps;
  for (const std::string& name : files::storage_of(root).list(root)) {
    const int64_t step = step_of(name);
    if (step >= 0 && is_complete(files::join(root, name)) == complete) steps.push_back(step);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

/// The steps of all complete ones but the newest `keep`.
std::vector<int64_t> older_than(const std::string& root, int keep) {
  std::vector<int64_t> steps = steps_in(root, true);
  steps.resize(steps.size() - std::min(steps.size(), static_cast<size_t>(keep)));
  return steps;
}

std::string name_of(int64_t step) { return std::string(kPrefix) + std::to_string(step); }

}  // namespace

Checkpoints::Checkpoints(std::string root, int keep_last)
    : root_(std::move(root)), keep_last_(keep_last) {
  TORCH_CHECK_VALUE(keep_last >= 0, "keep_last must not be negative, got ", keep_last);
}

std::string Checkpoints::folder_of(int64_t step) const {
  TORCH_CHECK_VALUE(step >= 0, "a step must not be negative, got ", step);
  return files::join(root_, name_of(step));
}

std::vector<int64_t> Checkpoints::steps() const { return steps_in(root_, true); }

std::optional<std::string> Checkpoints::latest() const {
  const auto complete = steps();
  if (complete.empty()) return std::nullopt;
  // The link counts while it leads somewhere: somebody may have turned it back on purpose.
  const int64_t step = step_of(files::storage_of(root_).link_target(files::join(root_, kLatest)));
  if (std::binary_search(complete.begin(), complete.end(), step)) return folder_of(step);
  return folder_of(complete.back());
}

std::vector<std::string> Checkpoints::prune(int keep) const {
  TORCH_CHECK_VALUE(keep >= 1, "prune keeps at least one checkpoint, got ", keep);
  std::vector<std::string> gone;
  const std::string newest = latest().value_or("");
  for (const int64_t step : older_than(root_, keep)) {
    if (folder_of(step) != newest) gone.push_back(folder_of(step));
  }
  for (const int64_t step : steps_in(root_, false)) gone.push_back(folder_of(step));
  for (const std::string& folder : gone) remove_checkpoint(folder);
  return gone;
}

SaveOptions Checkpoints::with_link(const SaveOptions& options, int64_t step) const {
  SaveOptions with = options;
  with.on_complete = [*this, step, next = options.on_complete] {
    files::storage_of(root_).link(files::join(root_, kLatest), name_of(step));
    if (keep_last_ > 0) {
      for (const int64_t old : older_than(root_, keep_last_)) {
        if (old != step) remove_checkpoint(folder_of(old));
      }
    }
    if (next) next();
  };
  return with;
}

void Checkpoints::save(const StateDict& state, int64_t step, const SaveOptions& options) const {
  dcp::save(state, folder_of(step), with_link(options, step));
}

AsyncSave Checkpoints::async_save(const StateDict& state, int64_t step,
                                  const SaveOptions& options) const {
  return dcp::async_save(state, folder_of(step), with_link(options, step));
}

}  // namespace fsdp2::dcp
