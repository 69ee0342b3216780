#include "train/generate.h"

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

std::string generate(Llama& model, std::string_view prompt, const SampleOptions& options,
                     const std::function<void(char)>& emit) {
  TORCH_CHECK_VALUE(options.tokens >= 0, "tokens must not be negative, got ", options.tokens);
  TORCH_CHECK_VALUE(options.temperature >= 0, "temperature must not be negative, got ",
                    options.temperature);
  TORCH_CHECK_VALUE(options.top_k >= 0, "top-k must not be negative, got ", options.top_k);
  const torch::NoGradGuard no_grad;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(options.seed);
  std::vector<int64_t> context{kEndOfDocument};
  for (const char c : prompt) context.push_back(static_cast<unsigned char>(c));
  std::string made;
  while (static_cast<int64_t>(made.size()) < options.tokens) {
    const int64_t length = std::min<int64_t>(context.size(), model->config().seq);
    const auto window =
        torch::tensor(c10::ArrayRef<int64_t>(context).slice(context.size() - length))
            .view({1, length});
    const int64_t token =
        pick(model->forward(window)[0][-1].to(torch::kFloat32), options, generator);
    if (token == kEndOfDocument) break;
    context.push_back(token);
    made.push_back(static_cast<char>(token));
    if (emit) emit(made.back());
  }
  return made;
}

}  // namespace fsdp2::train
