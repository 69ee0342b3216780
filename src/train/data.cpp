#include "train/data.h"

#include "train/permutation.h"
#include "train/random.h"

#include <torch/torch.h>

#include <algorithm>
#include <cstring>
#include <filesystem>

namespace fsdp2::train {
namespace {

namespace fs = std::filesystem;

struct Found {
  std::string name;  // relative to the path that was given: the same on every machine
  fs::path path;
};

bool wanted(const fs::path& path, const std::vector<std::string>& extensions) {
  if (extensions.empty()) return true;
  return std::any_of(extensions.begin(), extensions.end(), [&](const std::string& extension) {
    return path.extension() == (extension.starts_with('.') ? extension : "." + extension);
  });
}

std::vector<Found> find_files(const DataOptions& options) {
  TORCH_CHECK_VALUE(!options.paths.empty(), "no data: give at least one file or folder");
  std::vector<Found> found;
  for (const auto& given : options.paths) {
    const fs::path root(given);
    TORCH_CHECK_VALUE(fs::exists(root), "data: there is no file or folder ", given);
    if (!fs::is_directory(root)) {
      found.push_back({root.filename().string(), root});
      continue;
    }
    for (const auto& entry : fs::recursive_directory_iterator(root)) {
      if (entry.is_regular_file() && wanted(entry.path(), options.extensions)) {
        found.push_back({entry.path().lexically_relative(root).generic_string(), entry.path()});
      }
    }
  }
  std::sort(found.begin(), found.end(), [](const Found& a, const Found& b) {
    return std::pair(a.name, a.path) < std::pair(b.name, b.path);
  });
  return found;
}

/// `data` need not be aligned.
template <class T>
int64_t token_at(const char* data, int64_t index) {
  T token = 0;
  std::memcpy(&token, data + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return static_cast<int64_t>(token);
}

int64_t token_at(const char* data, int64_t index, int64_t width) {
  if (width == 1) return token_at<uint8_t>(data, index);
  return width == 2 ? token_at<uint16_t>(data, index) : token_at<uint32_t>(data, index);
}

int64_t count_tokens(const files::MappedFile& file, const std::string& path,
                     const DataOptions& options) {
  const auto bytes = static_cast<int64_t>(file.size());
  if (options.width == 1) return bytes;
  TORCH_CHECK_VALUE(bytes % options.width == 0, "data: ", path, " has ", bytes,
                    " bytes, which are no token ids of ", options.width, " bytes each");
  const int64_t count = bytes / options.width;
  int64_t largest = 0;
  for (int64_t i = 0; i < count; ++i)
    largest = std::max(largest, token_at(file.data(), i, options.width));
  TORCH_CHECK_VALUE(largest < options.vocab, "data: ", path, " has token ", largest,
                    ", but the model's vocabulary ends before ", options.vocab,
                    "; is it made by the model's tokenizer, of ", options.width, " bytes an id?");
  return count;
}

}  // namespace

void TokenStream::append(const Piece& piece) {
  if (piece.size == 0) return;
  pieces_.push_back(piece);
  starts_.push_back(starts_.back() + piece.size);
}

void TokenStream::read(int64_t offset, int64_t count, int64_t* out) const {
  auto at = static_cast<size_t>(std::upper_bound(starts_.begin(), starts_.end(), offset) -
                                starts_.begin() - 1);
  while (count > 0) {
    const auto& piece = pieces_[at];
    const int64_t from = offset - starts_[at];
    const int64_t take = std::min(count, piece.size - from);
    for (int64_t i = 0; i < take; ++i) {
      const bool end = !piece.open && from + i == piece.size - 1;
      out[i] = end ? 0 : token_at(piece.data, from + i, width_);
    }
    offset += take;
    out += take;
    count -= take;
    ++at;
  }
}

Dataset::Dataset(const DataOptions& options)
    : seq_(options.seq),
      width_(options.width),
      seed_(options.seed),
      train_(options.width),
      validation_(options.width) {
  TORCH_CHECK_VALUE(width_ == 1 || width_ == 2 || width_ == 4,
                    "data: tokens have 1, 2 or 4 bytes, not ", width_);
  TORCH_CHECK_VALUE(width_ > 1 || options.vocab >= kByteVocab,
                    "data: text needs a vocabulary of the ", kByteVocab,
                    " bytes at least, but the model's is ", options.vocab);
  TORCH_CHECK_VALUE(options.seq >= 1, "data: seq must be at least 1, got ", options.seq);
  TORCH_CHECK_VALUE(options.validation > 0 && options.validation < 1,
                    "data: the validation part must be between 0 and 1, got ", options.validation);
  const auto found = find_files(options);
  int64_t total = 0, held_out = 0;
  std::vector<bool> hold;
  std::vector<int64_t> sizes;
  sizes.reserve(found.size());
  for (const auto& file : found) {
    files_.emplace_back(file.path.string());
    const int64_t size = count_tokens(files_.back(), file.path.string(), options);
    sizes.push_back(size);
    hold.push_back(mix64(fnv1a64(file.name)) >> 11U <
                   static_cast<uint64_t>(options.validation * 0x1p53));
    total += size;
    if (hold.back()) held_out += size;
  }
  std::string where;
  for (const auto& path : options.paths) where += (where.empty() ? "" : ", ") + path;
  TORCH_CHECK_VALUE(total > 0, "data: no text in ", where,
                    options.extensions.empty() ? "" : " (of the given extensions)");

  const double share = static_cast<double>(held_out) / static_cast<double>(total);
  const bool by_document = share > options.validation / 2 && share < (1 + options.validation) / 2;
  for (size_t i = 0; i < files_.size(); ++i) {
    const char* data = files_[i].data();
    const int64_t end = is_text() ? 1 : 0;  // the zero byte
    if (by_document) {
      (hold[i] ? validation_ : train_).append({data, sizes[i] + end, /*open=*/!is_text()});
    } else {
      const auto kept =
          static_cast<int64_t>(static_cast<double>(sizes[i]) * (1 - options.validation));
      train_.append({data, kept, /*open=*/true});
      validation_.append({data + kept * width_, sizes[i] - kept + end, /*open=*/!is_text()});
    }
  }
  for (const auto* split : {&train_, &validation_}) {
    TORCH_CHECK_VALUE(split->size() > seq_, "data: the ",
                      split == &train_ ? "training" : "validation", " part of ", where, " has ",
                      split->size(), " tokens, but one window takes ", seq_ + 1);
  }
}

Batch Dataset::train_batch(int64_t micro, int64_t rank, int64_t ranks, int64_t batch) const {
  // One window less than fits, so that every epoch can start its windows at another offset.
  const int64_t per_epoch = std::max<int64_t>(1, (train_.size() - 1) / seq_ - 1);
  const int64_t slack = train_.size() - 1 - per_epoch * seq_;
  std::vector<int64_t> offsets;
  offsets.reserve(batch);
  for (int64_t row = 0; row < batch; ++row) {
    const int64_t index = (micro * ranks + rank) * batch + row;
    const auto epoch = static_cast<uint64_t>(index / per_epoch);
    const uint64_t key = mix64(seed_ + (epoch + 1) * kGolden);
    const auto shift = static_cast<int64_t>(key % static_cast<uint64_t>(std::min(seq_, slack) + 1));
    offsets.push_back(static_cast<int64_t>(permute(index % per_epoch, per_epoch, key)) * seq_ +
                      shift);
  }
  return windows(train_, offsets);
}

int64_t Dataset::validation_batches(int64_t limit, int64_t ranks, int64_t batch) const {
  const int64_t windows = (validation_.size() - 1) / seq_;
  return std::min(limit, (windows + ranks * batch - 1) / (ranks * batch));
}

Batch Dataset::validation_batch(int64_t index, int64_t count, int64_t rank, int64_t ranks,
                                int64_t batch) const {
  const int64_t last = validation_.size() - 1 - seq_;
  const int64_t steps = std::max<int64_t>(1, count * ranks * batch - 1);
  std::vector<int64_t> offsets;
  offsets.reserve(batch);
  for (int64_t row = 0; row < batch; ++row)
    offsets.push_back(((index * ranks + rank) * batch + row) * last / steps);
  return windows(validation_, offsets);
}

Batch Dataset::windows(const TokenStream& stream, const std::vector<int64_t>& offsets) const {
  auto tokens = torch::empty({static_cast<int64_t>(offsets.size()), seq_ + 1}, torch::kInt64);
  auto* out = tokens.data_ptr<int64_t>();
  for (const int64_t offset : offsets) {
    stream.read(offset, seq_ + 1, out);
    out += seq_ + 1;
  }
  return {tokens.narrow(1, 0, seq_).contiguous(), tokens.narrow(1, 1, seq_).contiguous()};
}

}  // namespace fsdp2::train
