#pragma once

// Files as training data, mapped. Text: a token is a byte, and a document (a file) ends with a zero
// byte. Or token ids that somebody else's tokenizer made: little-endian integers, as they are.

#include "checkpoint/mapped_file.h"
#include "train/tokens.h"

#include <string>
#include <vector>

namespace fsdp2::train {

inline constexpr int64_t kByteVocab = 256;

/// One split: documents one after another, as a single run of tokens of `width` bytes: 1, 2 or 4.
class TokenStream {
 public:
  struct Piece {
    const char* data = nullptr;  // size - 1 tokens and a zero, unless `open`
    int64_t size = 0;            // tokens
    bool open = false;           // the document goes on elsewhere: no zero here
  };

  explicit TokenStream(int64_t width = 1) : width_(width) {}

  void append(const Piece& piece);
  int64_t size() const { return starts_.back(); }
  /// Tokens [offset, offset + count) into `out`. The range lies inside the stream.
  void read(int64_t offset, int64_t count, int64_t* out) const;

 private:
  int64_t width_;
  std::vector<Piece> pieces_;
  std::vector<int64_t> starts_{0};
};

struct DataOptions {
  std::vector<std::string> paths{};       // files, and folders that are searched below
  std::vector<std::string> extensions{};  // of files in folders, e.g. "h"; empty: all files
  int64_t width = 1;                      // bytes a token: 1, text; 2 or 4, token ids
  int64_t vocab = kByteVocab;             // the model's
  double validation = 0.05;               // the part that is held out
  int64_t seq = 128;
  uint64_t seed = 1234;
};

/// What is held out depends on names and sizes of the files only: whole documents, chosen by a hash
/// of their path below the given folder; with too few documents for that, the end of each. Training
/// windows are `seq` tokens and the one after; every epoch visits each once, in an order that
/// depends on the seed, with borders that move.
class Dataset {
 public:
  /// Errors name the path: one that does not exist or cannot be read; nothing found; too little
  /// for one window; a token that is not in the vocabulary, for which all ids are read once.
  explicit Dataset(const DataOptions& options);

  /// Rank `rank`'s `batch` windows of micro-batch `micro` (counted from the start of the run), out
  /// of the ranks * batch that all ranks read. Together, the ranks read the same windows whatever
  /// their number.
  Batch train_batch(int64_t micro, int64_t rank, int64_t ranks, int64_t batch) const;
  /// How many batches of ranks * batch windows go through what is held out, at most `limit`.
  int64_t validation_batches(int64_t limit, int64_t ranks, int64_t batch) const;
  /// The same of batch `index` of `count`, whose windows are spread evenly over what is held out.
  Batch validation_batch(int64_t index, int64_t count, int64_t rank, int64_t ranks,
                         int64_t batch) const;

  bool is_text() const { return width_ == 1; }
  int64_t documents() const { return static_cast<int64_t>(files_.size()); }
  int64_t train_size() const { return train_.size(); }
  int64_t validation_size() const { return validation_.size(); }

 private:
  Batch windows(const TokenStream& stream, const std::vector<int64_t>& offsets) const;

  int64_t seq_, width_;
  uint64_t seed_;
  std::vector<files::MappedFile> files_;
  TokenStream train_, validation_;
};

}  // namespace fsdp2::train
