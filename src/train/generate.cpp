#include "train/generate.h"

#include "train/data.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <limits>

namespace fsdp2::train {
namespace {

constexpr int64_t kEndOfDocument = 0;

int64_t pick(torch::Tensor logits, const SampleOptions& options, at::Generator& generator) {
  if (options.temperature == 0) return logits.argmax().item<int64_t>();
  if (options.top_k > 0 && options.top_k < logits.numel()) {
    const auto least = std::get<0>(logits.topk(options.top_k)).min();
    logits = logits.masked_fill(logits < least, -std::numeric_limits<double>::infinity());
  }
  return torch::softmax(logits / options.temperature, -1)
      .multinomial(1, false, generator)
      .item<int64_t>();
}

}  // namespace

std::vector<int64_t> generate_tokens(Llama& model, const std::vector<int64_t>& prompt,
                                     const SampleOptions& options,
                                     const std::function<bool(int64_t)>& emit, int64_t choices) {
  TORCH_CHECK_VALUE(options.tokens >= 0, "tokens must not be negative, got ", options.tokens);
  TORCH_CHECK_VALUE(options.temperature >= 0, "temperature must not be negative, got ",
                    options.temperature);
  TORCH_CHECK_VALUE(options.top_k >= 0, "top-k must not be negative, got ", options.top_k);
  TORCH_CHECK_VALUE(!prompt.empty(), "the prompt must have a token at least");
  const int64_t vocab = model->config().vocab;
  for (const int64_t token : prompt) {
    TORCH_CHECK_VALUE(token >= 0 && token < vocab, "the prompt has token ", token,
                      ", but the model's vocabulary ends before ", vocab);
  }
  if (choices == 0) choices = vocab;
  const torch::NoGradGuard no_grad;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(options.seed);
  std::vector<int64_t> context = prompt, made;
  while (static_cast<int64_t>(made.size()) < options.tokens) {
    const int64_t length = std::min<int64_t>(context.size(), model->config().seq);
    const auto window =
        torch::tensor(c10::ArrayRef<int64_t>(context).slice(context.size() - length))
            .view({1, length});
    const auto logits = model->forward(window)[0][-1].narrow(0, 0, choices);
    const int64_t token = pick(logits.to(torch::kFloat32), options, generator);
    context.push_back(token);
    made.push_back(token);
    if (emit && !emit(token)) break;
  }
  return made;
}

std::string generate(Llama& model, std::string_view prompt, const SampleOptions& options,
                     const std::function<void(char)>& emit) {
  TORCH_CHECK_VALUE(model->config().vocab >= kByteVocab, "text needs a vocabulary of the ",
                    kByteVocab, " bytes at least, but the model's is ", model->config().vocab);
  std::vector<int64_t> context{kEndOfDocument};
  for (const char c : prompt) context.push_back(static_cast<unsigned char>(c));
  std::string made;
  generate_tokens(
      model, context, options,
      [&](int64_t token) {
        if (token == kEndOfDocument) return false;
        made.push_back(static_cast<char>(token));
        if (emit) emit(made.back());
        return true;
      },
      kByteVocab);
  return made;
}

}  // namespace fsdp2::train
