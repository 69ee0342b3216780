#include "checkpoint/exchange.h"
#include "checkpoint/load_plan.h"
#include "checkpoint/save_plan.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <numeric>

namespace fsdp2::dcp {
namespace {

bool is_row_major(const StoredTensor& stored) {
  int64_t step = 1;
  for (size_t d = stored.sizes.size(); d-- > 0;) {
    if (stored.sizes[d] != 1 && stored.strides[d] != step) return false;
    step *= stored.sizes[d];
  }
  return true;
}

/// Elements of `part` that lie one after the other in a row-major `all`.
int64_t run_length(const Block& part, const Block& all) {
  int64_t run = 1;
  for (size_t d = part.sizes.size(); d-- > 0;) {
    run *= part.sizes[d];
    if (part.sizes[d] != all.sizes[d]) break;
  }
  return run;
}

/// Where the first element of `part` is in a row-major `all`.
int64_t position(const Block& part, const Block& all) {
  int64_t at = 0;
  for (size_t d = 0; d < part.sizes.size(); ++d) {
    at = at * all.sizes[d] + part.offsets[d] - all.offsets[d];
  }
  return at;
}

/// One read: `block` is contiguous in the stored block, and `wanted` of it is copied.
struct Piece {
  const ReadTask* task;
  Block block, wanted;
};

/// Whole rows are read and cut where the wanted runs are too short to be read one by one.
void add_pieces(const ReadTask& task, int64_t most_bytes, std::vector<Piece>& pieces) {
  constexpr int64_t short_run = int64_t{256} * 1024;
  const auto element = static_cast<int64_t>(c10::elementSize(task.stored.dtype));
  const Block wanted = intersection(task.from, task.to);
  const int64_t run = run_length(wanted, task.from);
  Block read = wanted;
  int64_t most = most_bytes / element;
  if (run < wanted.numel()) {
    if (run * element >= short_run) {
      most = std::min(most, run);
    } else {
      read.offsets = task.from.offsets;
      read.sizes = task.from.sizes;
      read.offsets[0] = wanted.offsets[0];
      read.sizes[0] = wanted.sizes[0];
    }
  }
  for (Block& block : split(read, most)) {
    Block part = intersection(block, wanted);
    if (part.numel() > 0) pieces.push_back({&task, std::move(block), std::move(part)});
  }
}

void read(const Piece& piece) {
  const ReadTask& task = *piece.task;
  const auto element = static_cast<uint64_t>(c10::elementSize(task.stored.dtype));
  const uint64_t start =
      task.stored.data.offset +
      static_cast<uint64_t>(task.stored.storage_offset + position(piece.block, task.from)) *
          element;
  const uint64_t bytes = static_cast<uint64_t>(piece.block.numel()) * element;
  torch::Tensor target = view_of(task.data, task.to, piece.wanted);
  if (piece.block == piece.wanted && target.scalar_type() == task.stored.dtype &&
      target.device().is_cpu() && target.is_contiguous() && is_plain(target)) {
    task.file->read(start, target.mutable_data_ptr(), bytes);
    return;
  }
  torch::Tensor buffer = torch::empty(piece.block.sizes, torch::TensorOptions(task.stored.dtype));
  task.file->read(start, buffer.mutable_data_ptr(), bytes);
  target.copy_(view_of(buffer, piece.block, piece.wanted));
}

/// Strides other than rows: the whole storage is needed.
void read_strided(const ReadTask& task) {
  torch::Tensor storage =
      torch::empty({task.stored.storage_numel}, torch::TensorOptions(task.stored.dtype));
  task.file->read(task.stored.data.offset, storage.mutable_data_ptr(), storage.nbytes());
  const Block wanted = intersection(task.from, task.to);
  const torch::Tensor whole =
      storage.as_strided(task.stored.sizes, task.stored.strides, task.stored.storage_offset);
  view_of(task.data, task.to, wanted).copy_(view_of(whole, task.from, wanted));
}

}  // namespace

void run(const std::vector<ReadTask>& tasks, int threads) {
  std::vector<Piece> pieces;
  std::vector<const ReadTask*> strided;
  for (const ReadTask& task : tasks) {
    if (is_row_major(task.stored)) {
      add_pieces(task, kPieceBytes / threads, pieces);
    } else {
      strided.push_back(&task);
    }
  }
  std::atomic<size_t> next = 0;
  const auto work = [&] {
    torch::NoGradGuard no_grad;
    while (true) {
      const size_t i = next++;
      if (i < pieces.size()) {
        read(pieces[i]);
      } else if (i - pieces.size() < strided.size()) {
        read_strided(*strided[i - pieces.size()]);
      } else {
        return;
      }
    }
  };
  in_threads(std::vector<std::function<void()>>(static_cast<size_t>(threads), work));
}

}  // namespace fsdp2::dcp
