#include "cli/commands.h"
#include "cli/model_options.h"
#include "cli/options.h"
#include "train/generate.h"
#include "train/model_dir.h"
#include "train/trainer.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <map>
#include <memory>

namespace fsdp2::cli {
namespace {

struct TrainPreset {
  train::LlamaConfig model;
  int64_t batch, steps;
  double lr;
};

const std::map<std::string, TrainPreset>& train_presets() {
  static const std::map<std::string, TrainPreset> presets = {
      {"tiny", {{.dim = 128, .layers = 4, .heads = 4, .seq = 128}, 8, 600, 3e-3}},
      {"small", {{.dim = 384, .layers = 6, .heads = 6, .seq = 256}, 16, 4000, 1e-3}}};
  return presets;
}

struct TrainArguments {
  train::TrainOptions options;
  std::string preset = "tiny";
  std::string config;
  int threads = 0;
  int64_t sample = 200;
  std::string data_dtype = "text", out_dtype = "fp32";
};

/// The sizes of a new model, or that the folder to start from has them.
void take_model(const CLI::App& command, train::TrainOptions& options,
                const train::LlamaConfig& preset) {
  take_model_preset(command, options.model, preset);
  if (options.from.empty()) {
    options.model.vocab = train::kByteVocab;
    options.model = train::resolve(options.model);
    return;
  }
  for (const char* size : {"--dim", "--layers", "--heads", "--kv-heads", "--ffn", "--tied"}) {
    if (command.count(size) == 0) continue;
    throw CLI::ValidationError(std::string(size) + ": with --from the model's sizes are those in " +
                               options.from + "/config.json");
  }
  options.seq = options.model.seq;
}

int run(TrainArguments& arguments, CLI::App& command) {
  auto& options = arguments.options;
  if (!arguments.config.empty()) read_config(command, arguments.config);
  if (options.data.paths.empty()) throw CLI::RequiredError("--data");
  const auto& preset = train_presets().at(arguments.preset);
  take_model(command, options, preset.model);
  take_preset(command, "--batch", options.batch, preset.batch);
  take_preset(command, "--steps", options.schedule.steps, preset.steps);
  take_preset(command, "--lr", options.schedule.peak, preset.lr);
  take_preset(command, "--warmup", options.schedule.warmup,
              std::min<int64_t>(100, options.schedule.steps / 10));
  options.data.width = arguments.data_dtype == "text"     ? 1
                       : arguments.data_dtype == "uint16" ? 2
                                                          : 4;
  options.out_dtype = train::dtype_of(arguments.out_dtype);
  train::set_threads(arguments.threads);

  train::TrainResult result;
  bool first = false;
  {
    const train::World world;
    first = world.rank() == 0;
    result = train::train(options, world);
  }
  if (first && result.signal == 0) {
    const bool bytes = options.data.width == 1;
    std::printf("validation loss %.4f nats/%s\n", result.validation_loss, bytes ? "byte" : "token");
    if (bytes && !options.out.empty() && arguments.sample > 0) {
      auto model = train::load_model(options.out);
      const auto text =
          train::generate(model, "", {.tokens = arguments.sample, .seed = options.seed});
      std::printf("sample:\n%s\n", text.c_str());
    }
    std::fflush(stdout);
  }
  return result.signal == 0 ? 0 : 128 + result.signal;
}

}  // namespace

void add_train(CLI::App& app, int& exit_code) {
  auto* train = app.add_subcommand("train", "Train a language model, sharded over all ranks");
  auto arguments = std::make_shared<TrainArguments>();
  auto& o = arguments->options;

  train
      ->add_option("--config", arguments->config,
                   "TOML file of options, e.g. steps = 100; the command line wins")
      ->configurable(false);
  train->add_option("--data", o.data.paths, "Files and folders to train on (required)");
  train
      ->add_option("--data-dtype", arguments->data_dtype,
                   "What is in them: text, read as bytes; or token ids as these integers, as "
                   "numpy's tofile writes them")
      ->check(CLI::IsMember({"text", "uint16", "uint32"}))
      ->capture_default_str();
  train
      ->add_option("--extensions", o.data.extensions,
                   "Of the files to take from folders, e.g. h,cpp; default: all")
      ->delimiter(',');
  train->add_option("--val-fraction", o.data.validation, "Part of the text that is held out")
      ->capture_default_str();
  train->add_option("--from", o.from,
                    "Folder of a model to start from: of --out, or a Llama of Hugging Face's");
  train->add_option("--out", o.out,
                    "Folder to write the model to, which Hugging Face's transformers loads too");
  train->add_option("--out-dtype", arguments->out_dtype, "Dtype of the weights in it")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}))
      ->capture_default_str();
  train->add_option("--metrics", o.metrics, "File to write a JSON object a step to");
  add_trace_option(*train, o.trace, "3 to 5");

  add_preset_option(*train, arguments->preset, train_presets());
  add_model_options(*train, o.model);

  train->add_option("--batch", o.batch, "Windows a rank and micro-batch");
  train->add_option("--accum", o.accum, "Micro-batches a step")->capture_default_str();
  train->add_option("--steps", o.schedule.steps, "Optimizer steps");
  train->add_option("--lr", o.schedule.peak, "Highest learning rate");
  train
      ->add_option("--lr-final", o.schedule.final_fraction,
                   "Last learning rate, as a part of the highest")
      ->capture_default_str();
  train->add_option("--warmup", o.schedule.warmup,
                    "Steps of warm-up; default: a tenth, at most 100");
  train->add_option("--weight-decay", o.weight_decay, "Of matrices")->capture_default_str();
  train->add_option("--clip", o.clip, "Largest gradient norm; 0: no clipping")
      ->capture_default_str();
  train->add_option("--seed", o.seed, "Of weights and order of data")->capture_default_str();
  add_sharding_options(*train, o.sharding);
  train->add_option("--val-every", o.val_every, "Steps between validations; 0: only at the end")
      ->capture_default_str();
  train->add_option("--val-batches", o.val_batches, "Batches a validation")->capture_default_str();
  train->add_option("--log-every", o.log_every, "Steps between lines where stderr is no terminal")
      ->capture_default_str();
  train->add_option("--sample", arguments->sample, "Bytes of text to make at the end, with --out")
      ->capture_default_str();
  train
      ->add_option("--threads", arguments->threads,
                   "Compute threads a rank; 0: OMP_NUM_THREADS, or the cores shared among the "
                   "ranks of this host")
      ->capture_default_str();
  last_wins(*train);
  train->callback([arguments, train, &exit_code] { exit_code = run(*arguments, *train); });
}

}  // namespace fsdp2::cli
