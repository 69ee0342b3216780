#include "train/plan.h"

#include <algorithm>
#include <cstdio>

namespace fsdp2::train {
namespace {

struct Row {
  const char* name;
  const char* key;
  int64_t Moment::* bytes;
};
constexpr Row kRows[] = {
    {"shards", "shards", &Moment::shards},
    {"sharded gradients", "gradients", &Moment::gradients},
    {"optimizer state", "optimizer", &Moment::optimizer},
    {"gathered parameters", "gathered", &Moment::gathered},
    {"gather buffers", "gather_buffers", &Moment::gather_buffers},
    {"parts kept after forward", "kept_parts", &Moment::kept_parts},
    {"whole gradients", "whole_gradients", &Moment::whole_gradients},
    {"reduce buffers", "reduce_buffers", &Moment::reduce_buffers},
    {"activations, temporaries (estimate)", "activations_estimate", &Moment::activations},
};

std::string text_of(int64_t bytes) {
  char text[32];
  const double mib = static_cast<double>(bytes) / (1 << 20);
  if (mib >= 1024) {
    std::snprintf(text, sizeof text, "%.2f GiB", mib / 1024);
  } else {
    std::snprintf(text, sizeof text, "%.2f MiB", mib);
  }
  return text;
}

std::string padded(const std::string& text, size_t width, bool left = false) {
  const std::string space(width > text.size() ? width - text.size() : 0, ' ');
  return left ? text + space : space + text;
}

int64_t device_bytes(const PlanOptions& options, const Moment& moment) {
  return moment.total() - (options.offload ? moment.sharded() : 0);
}

}  // namespace

std::string plan_table(const PlanOptions& options, const MemoryPlan& plan) {
  constexpr size_t kName = 36;
  const auto line = [&](const std::string& name, const auto& value_of) {
    std::string out = padded(name, kName, /*left=*/true);
    for (const Moment& moment : plan.moments) {
      out += padded(value_of(moment), std::max<size_t>(12, moment.name.size() + 2));
    }
    return out + '\n';
  };
  char head[256];
  std::snprintf(head, sizeof head,
                "%.3fM parameters on %lld ranks (%lld replicas x %lld shards); a rank holds %.3fM, "
                "the largest group has %.3fM\n",
                plan.parameters / 1e6, static_cast<long long>(options.replicate * options.shard),
                static_cast<long long>(options.replicate), static_cast<long long>(options.shard),
                plan.shard_parameters / 1e6, plan.largest_group / 1e6);
  std::string out = head;
  out += line("memory a rank", [](const Moment& moment) { return moment.name; });
  for (const Row& row : kRows) {
    out += line(row.name, [&](const Moment& moment) { return text_of(moment.*row.bytes); });
  }
  out += line("total", [](const Moment& moment) { return text_of(moment.total()); });
  if (options.offload) {
    out += line("  of it on the device",
                [&](const Moment& moment) { return text_of(device_bytes(options, moment)); });
  }
  return out + "peak: " + text_of(plan.peak().total()) + " (" + plan.peak().name + ")\n";
}

nlohmann::ordered_json plan_json(const PlanOptions& options, const MemoryPlan& plan) {
  nlohmann::ordered_json json = {{"parameters", plan.parameters},
                                 {"ranks", options.replicate * options.shard},
                                 {"replicate", options.replicate},
                                 {"shard", options.shard},
                                 {"shard_parameters", plan.shard_parameters},
                                 {"largest_group_parameters", plan.largest_group},
                                 {"peak_bytes", plan.peak().total()},
                                 {"peak_at", plan.peak().name}};
  int64_t device = 0;
  for (const Moment& moment : plan.moments) {
    nlohmann::ordered_json item = {{"name", moment.name}};
    for (const Row& row : kRows) item[row.key] = moment.*row.bytes;
    item["total"] = moment.total();
    item["device"] = device_bytes(options, moment);
    device = std::max(device, device_bytes(options, moment));
    json["moments"].push_back(item);
  }
  json["device_peak_bytes"] = device;
  return json;
}

}  // namespace fsdp2::train
