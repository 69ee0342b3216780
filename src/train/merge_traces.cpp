#include "train/merge_traces.h"

#include <c10/util/Exception.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

namespace fsdp2::train {
namespace {

using TraceJson = nlohmann::ordered_json;

constexpr int64_t kFirstThread = 10;               // below it are the lanes
constexpr int64_t kIdsOfRank = int64_t{1} << 32U;  // of arrows between events
constexpr const char* kLanes[] = {"step", "gather", "reduce", "wait", "optimizer"};

/// Where a range of the library, or of the program around it, is shown besides its own thread.
std::optional<int64_t> lane_of(const TraceJson& event) {
  if (event.value("cat", "") != "user_annotation") return std::nullopt;
  const auto name = event.at("name").get<std::string>();
  if (!name.starts_with("fsdp2::")) return 0;
  for (const auto& [prefix, lane] : {std::pair("fsdp2::gather ", 1),
                                     {"fsdp2::reduce ", 2},
                                     {"fsdp2::wait ", 3},
                                     {"fsdp2::optimizer", 4},
                                     {"fsdp2::clip_grad_norm_", 4}}) {
    if (name.starts_with(prefix)) return lane;
  }
  return std::nullopt;
}

TraceJson metadata(const char* what, int rank, int64_t thread, const char* key,
                   const TraceJson& value) {
  return {{"ph", "M"}, {"name", what}, {"pid", rank}, {"tid", thread}, {"args", {{key, value}}}};
}

/// One rank's events, as they are to be in the trace of all.
class Joined {
 public:
  Joined(int rank, const TraceJson& trace, int64_t origin_ns) : rank_(rank) {
    later_us_ =
        static_cast<double>(trace.value("baseTimeNanoseconds", origin_ns) - origin_ns) / 1e3;
    const TraceJson& events = trace.at("traceEvents");
    for (const TraceJson& event : events) {
      if (event.at("name") == "process_labels" && event.at("args").at("labels") == "CPU")
        process_ = event.at("pid");
    }
    named("rank " + std::to_string(rank));
    for (int64_t lane = 0; lane < std::ssize(kLanes); ++lane) thread(lane, kLanes[lane]);
    for (const TraceJson& event : events) add(event);
  }

  const std::vector<TraceJson>& events() const { return events_; }

 private:
  void named(const std::string& name) {
    events_.push_back(metadata("process_name", rank_, 0, "name", name));
    events_.push_back(metadata("process_sort_index", rank_, 0, "sort_index", rank_));
  }
  void thread(int64_t id, const std::string& name) {
    events_.push_back(metadata("thread_name", rank_, id, "name", name));
    events_.push_back(metadata("thread_sort_index", rank_, id, "sort_index", id));
  }

  /// Threads and devices get numbers of their own, as a trace of all has them for each rank.
  int64_t thread_of(const TraceJson& event) {
    const auto key = std::pair(event.at("pid").dump(), event.at("tid").dump());
    const auto [found, is_new] =
        threads_.try_emplace(key, kFirstThread + static_cast<int64_t>(threads_.size()));
    if (is_new) {
      const bool main = event.at("tid") == event.at("pid");
      thread(found->second, event.at("pid") != process_
                                ? "device " + key.first + ", stream " + key.second
                            : main ? "compute"
                                   : "compute, thread " + key.second);
    }
    return found->second;
  }

  void add(TraceJson event) {
    const auto phase = event.value("ph", "");
    if (phase == "M" || !event.at("pid").is_number() || !event.contains("ts")) return;
    event["tid"] = thread_of(event);
    event["pid"] = rank_;
    event["ts"] = event["ts"].get<double>() + later_us_;
    if (event.contains("id") && event["id"].is_number_integer())
      event["id"] = event["id"].get<int64_t>() + rank_ * kIdsOfRank;
    const auto lane = phase == "X" ? lane_of(event) : std::nullopt;
    events_.push_back(event);
    if (!lane) return;
    event["tid"] = *lane;
    event.erase("args");
    events_.push_back(std::move(event));
  }

  const int rank_;
  double later_us_ = 0;
  TraceJson process_;
  std::map<std::pair<std::string, std::string>, int64_t> threads_;
  std::vector<TraceJson> events_;
};

TraceJson read_trace(const std::filesystem::path& file) {
  std::ifstream in(file);
  try {
    return TraceJson::parse(in);
  } catch (const nlohmann::json::exception& error) {
    TORCH_CHECK(false, file.string(), " is not a trace: ", error.what());
  }
}

}  // namespace

void merge_traces(const std::vector<RankTrace>& traces, const std::filesystem::path& out) {
  std::ofstream file(out, std::ios::trunc);
  std::optional<int64_t> origin_ns;
  const char* separator = "\n";
  for (const RankTrace& item : traces) {
    const TraceJson trace = read_trace(item.file);
    if (!origin_ns) {
      origin_ns = trace.value("baseTimeNanoseconds", int64_t{0});
      file << R"({"displayTimeUnit": "ms", "baseTimeNanoseconds": )" << *origin_ns
           << R"(, "traceEvents": [)";
    }
    const Joined joined(item.rank, trace, *origin_ns);
    for (const TraceJson& event : joined.events()) {
      file << separator << event.dump();
      separator = ",\n";
    }
  }
  file << "\n]}\n" << std::flush;
  TORCH_CHECK(file.good(), "cannot write ", out.string());
}

}  // namespace fsdp2::train
