#include "train/generate.h"

#include "cli/commands.h"
#include "cli/options.h"
#include "train/model_dir.h"
#include "train/world.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>

namespace fsdp2::cli {
namespace {

struct GenerateArguments {
  std::string from, prompt;
  train::SampleOptions sample;
  int threads = 0;
};

}  // namespace

void add_generate(CLI::App& app, int& exit_code) {
  auto* generate =
      app.add_subcommand("generate", "Continue a prompt with a model that `fsdp2 train` wrote");
  auto arguments = std::make_shared<GenerateArguments>();
  auto& a = *arguments;
  generate->add_option("--from", a.from, "Folder with model.safetensors and config.json")
      ->required();
  generate->add_option("--prompt", a.prompt, "Text to continue; default: the start of a document");
  generate->add_option("--tokens", a.sample.tokens, "Bytes to make at most")->capture_default_str();
  generate->add_option("--temperature", a.sample.temperature, "0: always the likeliest")
      ->capture_default_str();
  generate->add_option("--top-k", a.sample.top_k, "Choose among the k likeliest; 0: all")
      ->capture_default_str();
  generate->add_option("--seed", a.sample.seed, "Of the choices")->capture_default_str();
  generate->add_option("--threads", a.threads, "Compute threads; 0: OMP_NUM_THREADS, or all cores")
      ->capture_default_str();
  last_wins(*generate);
  generate->callback([arguments, &exit_code] {
    train::set_threads(arguments->threads);
    auto model = train::load_model(arguments->from);
    std::fputs(arguments->prompt.c_str(), stdout);
    train::generate(model, arguments->prompt, arguments->sample, [](char byte) {
      std::fputc(byte, stdout);
      std::fflush(stdout);
    });
    std::fputc('\n', stdout);
    exit_code = 0;
  });
}

}  // namespace fsdp2::cli
