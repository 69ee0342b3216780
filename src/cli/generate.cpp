#include "train/generate.h"

#include "cli/commands.h"
#include "cli/options.h"
#include "train/model_dir.h"
#include "train/world.h"

#include <c10/util/Exception.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <sstream>

namespace fsdp2::cli {
namespace {

struct GenerateArguments {
  std::string from, prompt;
  bool ids = false;
  train::SampleOptions sample;
  int threads = 0;
};

std::vector<int64_t> parse_ids(const std::string& text) {
  std::vector<int64_t> ids;
  std::istringstream stream(text);
  for (std::string word; stream >> word;) {
    const bool digits =
        std::all_of(word.begin(), word.end(), [](char c) { return '0' <= c && c <= '9'; });
    TORCH_CHECK_VALUE(digits && word.size() < 10, "--prompt: '", word,
                      "' is no token id; with --ids it is numbers with spaces between them");
    ids.push_back(std::stoll(word));
  }
  return ids;
}

void continue_ids(train::Llama& model, const GenerateArguments& arguments) {
  const auto prompt = parse_ids(arguments.prompt);
  train::generate_tokens(model, prompt, arguments.sample, [](int64_t token) {
    std::printf("%lld ", static_cast<long long>(token));
    std::fflush(stdout);
    return true;
  });
}

void continue_text(train::Llama& model, const GenerateArguments& arguments) {
  std::fputs(arguments.prompt.c_str(), stdout);
  train::generate(model, arguments.prompt, arguments.sample, [](char byte) {
    std::fputc(byte, stdout);
    std::fflush(stdout);
  });
}

}  // namespace

void add_generate(CLI::App& app, int& exit_code) {
  auto* generate = app.add_subcommand(
      "generate", "Continue a prompt with a model of `fsdp2 train`, or a Llama of Hugging Face's");
  auto arguments = std::make_shared<GenerateArguments>();
  auto& a = *arguments;
  generate->add_option("--from", a.from, "Folder of the model: config.json and safetensors")
      ->required();
  generate->add_option("--prompt", a.prompt, "Text to continue; default: the start of a document");
  generate->add_flag("--ids", a.ids,
                     "The prompt is token ids, such as \"1 15043\", and so is what is made: for "
                     "models with a tokenizer");
  generate->add_option("--tokens", a.sample.tokens, "Bytes or ids to make at most")
      ->capture_default_str();
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
    (arguments->ids ? continue_ids : continue_text)(model, *arguments);
    std::fputc('\n', stdout);
    exit_code = 0;
  });
}

}  // namespace fsdp2::cli
