#include "train/plan.h"

#include "cli/commands.h"
#include "cli/model_options.h"
#include "cli/options.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <map>
#include <memory>

namespace fsdp2::cli {
namespace {

const std::map<std::string, train::LlamaConfig>& plan_presets() {
  static const std::map<std::string, train::LlamaConfig> presets = {
      {"tiny", {.dim = 128, .layers = 4, .heads = 4, .seq = 128}},
      {"8b",
       {.dim = 4096,
        .layers = 32,
        .heads = 32,
        .kv_heads = 8,
        .ffn = 14336,
        .vocab = 128256,
        .seq = 8192}},
      {"70b",
       {.dim = 8192,
        .layers = 80,
        .heads = 64,
        .kv_heads = 8,
        .ffn = 28672,
        .vocab = 128256,
        .seq = 8192}},
      {"405b",
       {.dim = 16384,
        .layers = 126,
        .heads = 128,
        .kv_heads = 8,
        .ffn = 53248,
        .vocab = 128256,
        .seq = 8192}}};
  return presets;
}

struct PlanArguments {
  train::PlanOptions options;
  std::string preset = "tiny";
  int64_t ranks = 1;
  bool json = false;
};

void run(PlanArguments& arguments, const CLI::App& command) {
  auto& options = arguments.options;
  const auto& preset = plan_presets().at(arguments.preset);
  take_model_preset(command, options.model, preset);
  take_preset(command, "--kv-heads", options.model.kv_heads, preset.kv_heads);
  take_preset(command, "--ffn", options.model.ffn, preset.ffn);
  take_preset(command, "--vocab", options.model.vocab, preset.vocab);
  options.model = train::resolve(options.model);
  if (arguments.ranks < 1 || options.replicate < 1 || arguments.ranks % options.replicate != 0) {
    throw std::invalid_argument("--ranks " + std::to_string(arguments.ranks) +
                                " is not a multiple of --replicate " +
                                std::to_string(options.replicate));
  }
  options.shard = arguments.ranks / options.replicate;
  const auto plan = train::plan_memory(options);
  std::printf("%s", arguments.json ? (train::plan_json(options, plan).dump(1) + "\n").c_str()
                                   : train::plan_table(options, plan).c_str());
}

}  // namespace

void add_plan(CLI::App& app, int& exit_code) {
  auto* plan = app.add_subcommand(
      "plan",
      "Forecast the memory of a rank from sizes alone; nothing is allocated.\nOf a rank that "
      "shares none: ranks on the CPU of one host keep one copy of all whole parameters\ntogether, "
      "and their gradients in buffers that all see.");
  auto arguments = std::make_shared<PlanArguments>();
  auto& o = arguments->options;
  add_preset_option(*plan, arguments->preset, plan_presets());
  add_model_options(*plan, o.model);
  plan->add_option("--vocab", o.model.vocab, "Tokens");
  plan->add_option("--ranks", arguments->ranks, "In the world")->capture_default_str();
  plan->add_option("--replicate", o.replicate, "Copies of the model (HSDP); divides --ranks")
      ->capture_default_str();
  plan->add_option("--batch", o.batch, "Sequences a rank and micro-batch")->capture_default_str();
  add_precision_options(*plan, o.param_dtype, o.reduce_dtype);
  plan->add_option("--optimizer", o.optimizer, "adamw, adam, momentum (SGD with it) or sgd")
      ->check(CLI::IsMember({"adamw", "adam", "momentum", "sgd"}))
      ->capture_default_str();
  plan->add_option("--reshard-after-forward", o.reshard_after_forward, "Free blocks after forward")
      ->capture_default_str();
  plan->add_option("--reshard-to", o.reshard_to,
                   "Ranks that share a block between forward and backward, a factor of all shards; "
                   "0: all")
      ->capture_default_str();
  plan->add_option("--checkpoint-blocks", o.checkpoint, "Run each block again in backward")
      ->capture_default_str();
  plan->add_option("--nvme-moments", o.nvme_moments, "Keep the moments of AdamW in files")
      ->capture_default_str();
  plan->add_option("--offload", o.offload, "Keep shards and optimizer in host memory")
      ->capture_default_str();
  plan->add_option("--backend", o.backend, "gloo, which reduces a copy, or nccl")
      ->check(CLI::IsMember({"gloo", "nccl"}))
      ->capture_default_str();
  plan->add_flag("--json", arguments->json, "Bytes, as JSON");
  last_wins(*plan);
  plan->callback([arguments, plan, &exit_code] {
    run(*arguments, *plan);
    exit_code = 0;
  });
}

}  // namespace fsdp2::cli
