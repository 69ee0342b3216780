#include "train/step_trace.h"

#include "train/merge_traces.h"

#include <torch/csrc/autograd/profiler_kineto.h>

#include <cstdlib>
#include <fstream>

namespace fsdp2::train {
namespace {

namespace fs = std::filesystem;
namespace kineto = torch::autograd::profiler;
using torch::profiler::impl::ActivityType;

void start_profiler() {
  ::setenv("KINETO_LOG_LEVEL", "99", /*overwrite=*/0);  // else it notes each start on stderr
  std::set<ActivityType> activities = {ActivityType::CPU};
  if (get_device().is_cuda()) activities.insert(ActivityType::CUDA);
  const torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO);
  kineto::prepareProfiler(config, activities);
  kineto::enableProfiler(config, activities);
}

void check_writable(const fs::path& file) {
  std::ofstream probe(file, std::ios::trunc);
  TORCH_CHECK_VALUE(probe.good(), "cannot write ", file.string());
}

}  // namespace

StepTrace::StepTrace(const std::string& path, const World& world, int64_t first, int64_t count)
    : world_(world), first_(first), last_(first + count - 1), one_file_(path.ends_with(".json")) {
  if (path.empty() || count < 1) return;
  whole_ = one_file_ ? fs::path(path) : fs::path(path) / "trace.json";
  agree("--trace", [&] {
    const fs::path folder = whole_.parent_path();
    if (!folder.empty()) fs::create_directories(folder);
    check_writable(part(world_.rank()));
    // Those of an earlier run too, which would be taken for ranks of other hosts.
    for (int rank = 0; rank < world_.size(); ++rank) fs::remove(part(rank));
  });
}

StepTrace::~StepTrace() {
  if (recording_) kineto::disableProfiler();
}

fs::path StepTrace::part(int rank) const {
  const std::string name = "rank_" + std::to_string(rank) + ".json";
  return one_file_ ? fs::path(whole_.string() + "." + name) : whole_.parent_path() / name;
}

void StepTrace::begin(int64_t step) {
  if (whole_.empty() || step != first_) return;
  start_profiler();
  recording_ = true;
}

void StepTrace::end(int64_t step) {
  if (recording_ && step == last_) finish();
}

void StepTrace::finish() {
  if (!recording_) return;
  recording_ = false;
  const auto result = kineto::disableProfiler();
  agree("cannot write the trace", [&] {
    const fs::path file = part(world_.rank());
    result->save(file.string());
    TORCH_CHECK(fs::exists(file), "libtorch's profiler has not written ", file.string());
  });
  agree("cannot join the traces of all ranks", [&] {
    if (world_.rank() != 0) return;
    std::vector<RankTrace> parts;
    for (int rank = 0; rank < world_.size(); ++rank) {
      if (fs::exists(part(rank))) parts.push_back({rank, part(rank)});
    }
    merge_traces(parts, whole_);
    for (const RankTrace& item : parts) {
      if (one_file_) fs::remove(item.file);
    }
  });
  written_ = true;
}

}  // namespace fsdp2::train
