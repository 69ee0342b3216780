#include "cli/bench_parts.h"
#include "cli/commands.h"
#include "cli/model_options.h"
#include "cli/options.h"
#include "train/step_bench.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <map>
#include <memory>

namespace fsdp2::cli {
namespace {

struct StepArguments {
  train::StepBenchOptions options;
  std::string json;
};

struct StepPreset {
  train::LlamaConfig model;
  int64_t batch;
};
const std::map<std::string, StepPreset> kStepPresets = {
    {"tiny", {{.dim = 128, .layers = 4, .heads = 4, .vocab = 1000, .seq = 64}, 4}},
    {"small", {{.dim = 512, .layers = 8, .heads = 8, .vocab = 8000, .seq = 128}, 2}},
    {"medium", {{.dim = 1024, .layers = 12, .heads = 16, .vocab = 16000, .seq = 128}, 1}}};

void run(StepArguments& arguments, const CLI::App& command) {
  auto& options = arguments.options;
  const auto& preset = kStepPresets.at(options.preset);
  take_model_preset(command, options.model, preset.model);
  take_preset(command, "--vocab", options.model.vocab, preset.model.vocab);
  take_preset(command, "--batch", options.batch, preset.batch);
  options.model = train::resolve(options.model);
  if (options.mode != "fsdp2" && options.sharding.param_dtype != "fp32") {
    throw std::invalid_argument("--mode " + options.mode + " computes in fp32: drop --param-dtype");
  }
  const auto report = train::run_step_bench(options);
  if (!report) return;
  write_report(arguments.json, *report);
  const auto number = [&](const char* key) {
    return report->contains(key) ? report->at(key).get<double>() : 0.0;
  };
  const auto losses = report->at("losses").get<std::vector<double>>();
  std::printf("%-6s W=%d params=%.2fM step=%.1fms p10=%.1f p90=%.1f tok/s=%.0f rss=%.0fMiB",
              options.mode.c_str(), report->at("config").at("world").get<int>(),
              number("params") / 1e6, number("step_ms_median"), number("step_ms_p10"),
              number("step_ms_p90"), number("tokens_per_s"), number("peak_rss_mib_max"));
  if (report->contains("all_gathers"))
    std::printf(" AG=%.0f RS=%.0f", number("all_gathers"), number("reduce_scatters"));
  std::printf(" loss %.6f->%.6f\n", losses.front(), losses.back());
  if (report->contains("trace"))
    std::printf("trace: %s\n", report->at("trace").get<std::string>().c_str());
}

}  // namespace

void add_bench(CLI::App& app, int& exit_code) {
  auto* bench = app.add_subcommand("bench", "Measure the library");
  bench->require_subcommand(1);
  add_bench_checkpoint(*bench);
  add_bench_collectives(*bench);
  add_bench_overhead(*bench);
  add_bench_scale(*bench);
  auto* step = bench->add_subcommand(
      "step", "Train a decoder on synthetic tokens; report losses, times, memory and collectives");
  auto arguments = std::make_shared<StepArguments>();
  auto& o = arguments->options;

  step->add_option("--mode", o.mode, "fsdp2; ddp: replicated; local: one process")
      ->check(CLI::IsMember({"fsdp2", "ddp", "local"}))
      ->capture_default_str();
  add_preset_option(*step, o.preset, kStepPresets);
  add_model_options(*step, o.model);
  step->add_option("--vocab", o.model.vocab, "Tokens");
  step->add_option("--batch", o.batch, "Sequences a rank");
  step->add_option("--steps", o.steps, "Timed steps")->capture_default_str();
  step->add_option("--warmup", o.warmup, "Steps before them")->capture_default_str();
  step->add_option("--lr", o.lr, "Learning rate of AdamW")->capture_default_str();
  step->add_option("--seed", o.seed, "Of weights and tokens")->capture_default_str();
  step->add_option("--accum", o.accum, "Micro-batches a step")->capture_default_str();
  step->add_option("--clip", o.clip, "Largest gradient norm; 0: no clipping")
      ->capture_default_str();
  step->add_option("--norm-impl", o.norm_impl,
                   "torch, fast: fsdp2::clip_grad_norm_; fp64: the same in double; off")
      ->check(CLI::IsMember({"torch", "fast", "fp64", "off"}))
      ->capture_default_str();
  add_sharding_options(*step, o.sharding);
  step->add_option("--output-dtype", o.sharding.output_dtype, "Cast the logits to this")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}));
  step->add_option("--local-world", o.local_world,
                   "local: concatenate the batches of this many ranks")
      ->capture_default_str();
  step->add_option("--local-replicas", o.local_replicas,
                   "local, on several ranks: independent copies")
      ->capture_default_str();
  step->add_option("--threads", o.threads, "Compute threads a rank")->capture_default_str();
  step->add_option("--load-init", o.load_init, "Initial weights (safetensors)")
      ->check(CLI::ExistingFile);
  step->add_option("--dump-init", o.dump_init, "Write the initial weights (safetensors)");
  step->add_option("--dump-final", o.dump_final, "Write the final weights (safetensors)");
  step->add_option("--start-step", o.start_step, "First step number of the token stream")
      ->capture_default_str();
  step->add_option("--json", arguments->json, "Write the report");
  add_trace_option(*step, o.trace, "1 to 3 of those that are timed, which then take longer");
  last_wins(*step);
  step->callback([arguments, step, &exit_code] {
    run(*arguments, *step);
    exit_code = 0;
  });
}

}  // namespace fsdp2::cli
