#pragma once

// Distributed checkpoints in PyTorch's own format: what is saved here loads with
// torch.distributed.checkpoint in Python and the other way round, from any number of ranks and any
// layout into any other. Follows pytorch.org/docs/stable/distributed.checkpoint.html; the files are
// described in docs/checkpoint_format.md.
//
//   dcp::StateDict state;
//   state["model"] = get_model_state_dict(*model);
//   state["optim"] = get_optimizer_state_dict(*model, optimizer);
//   state["epoch"] = 3;
//   dcp::save(state, "runs/a/step_100");
//   ...
//   dcp::load(state, "runs/a/step_100");   // tensors in place, other values replaced
//
// A checkpoint is complete once its `.metadata` is there, which is written last: data files,
// flushed to the disk; then it, renamed into place. Saving over an older checkpoint writes new
// files beside the old ones and removes those afterwards, so that whatever happens the folder holds
// the one or the other. No rank fails alone: an error on one is raised on all, naming the rank.
//
// "s3://bucket/prefix" may stand for any folder of a checkpoint: docs/s3.md.
//
// All functions are collective over the group, called by every rank of it. Not thread-safe.

#include <fsdp2/dcp_metadata.h>
#include <fsdp2/dcp_value.h>
#include <fsdp2/process_group.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace fsdp2::dcp {

struct SaveOptions {
  /// Whose ranks take part; messages go through a group of their own. Null: the world's; without a
  /// world, this process alone. A DTensor over ranks outside of it is an error.
  ProcessGroup process_group{};
  /// Threads and files a rank; 0: the host's cores shared among its ranks, at most 4.
  int threads = 0;
  /// Called on the first rank once the checkpoint is complete, from the thread that wrote it.
  std::function<void()> on_complete{};
};

/// Writes `state` into `folder`, which is made if need be and which all ranks must see. Every shard
/// is written by a rank that has it, once; what is the same on several ranks is spread over them.
/// Plain tensors and values count as the same on all ranks: where they differ, the first rank's are
/// saved, with a warning that names the key. Keys may be on some ranks only. Errors before anything
/// is written: a Partial; a tensor on the meta device; a dtype that torch has no name for; one key
/// with several sizes, dtypes or kinds. Beyond the state it needs two buffers of 64 MiB, at most.
void save(const StateDict& state, const std::string& folder, const SaveOptions& options = {});

/// A save that goes on in the background. Copies are the same save.
class AsyncSave {
 public:
  /// Whether it has ended, well or not.
  bool done() const;
  /// Until the checkpoint is complete. Throws what went wrong, on all ranks.
  void wait() const;

  struct State;
  explicit AsyncSave(std::shared_ptr<State> state = nullptr) : state_(std::move(state)) {}

 private:
  std::shared_ptr<State> state_;
};

/// As save(), but returns once the values have been copied, so that training may go on; a thread
/// writes the copies. One save is under way at a time: the next one, of either kind, waits for it,
/// and throws its error if nobody has waited for it. The memory of the copies is kept for the next
/// time. The process waits at its end for a save that is under way.
AsyncSave async_save(const StateDict& state, const std::string& folder,
                     const SaveOptions& options = {});
/// Waits for a save that is under way, throws its error if nobody has, and frees the copies'
/// memory.
void finish_async_saves();

struct LoadOptions {
  ProcessGroup process_group{};
  /// Keys that the checkpoint lacks are left as they are and returned, instead of an error. Still
  /// an error if the checkpoint has none of the keys.
  bool allow_partial = false;
  /// Allows conversions that round (float32 into bfloat16: to the nearest, ties to even). Without
  /// it they are errors; conversions that are exact are made, and floats never become integers.
  bool allow_narrowing = false;
  /// Only these keys, and what lies below them ("model", "model.layers.0").
  std::vector<std::string> only{};
  /// Compares what is read with the checksums of the save first; error if there are none.
  bool verify = false;
  /// Of a rank; as SaveOptions.
  int threads = 0;
};

/// The same on all ranks, sorted.
struct LoadReport {
  std::vector<std::string> missing;     // asked for by a rank, not in the checkpoint
  std::vector<std::string> unexpected;  // in the checkpoint, asked for by no rank
  std::vector<std::string> converted;   // "model.weight: bfloat16 to float32"
};

/// Fills `state` from the checkpoint in `folder`. Tensors are filled in place, whatever layout they
/// were saved in; they keep their dtype and layout, and a rank reads only what it needs. Other
/// values are replaced; lists without tensors as a whole. None stands for whatever there is: it
/// becomes a value, or a dict of all that lies below, tensors whole and on the CPU. Errors, on all
/// ranks and before anything is written: see read_metadata; a key that is missing, with the names
/// most like it; another size; a conversion that is not allowed; a data file that is missing, cut
/// short or damaged in its structure. After an error while reading itself (a disk that fails) the
/// message says that the state is undefined.
LoadReport load(StateDict& state, const std::string& folder, const LoadOptions& options = {});

/// A checkpoint that stays open, to be read piece by piece: its metadata is read once, each of its
/// files is opened once. A save into its folder must not happen meanwhile. Local: needs no process
/// group. Not thread-safe.
class Reader {
 public:
  /// Errors: see read_metadata.
  explicit Reader(const std::string& folder);
  ~Reader();
  Reader(Reader&&) noexcept;
  Reader& operator=(Reader&&) noexcept;

  const Metadata& metadata() const;
  /// In the order in which they were saved.
  std::vector<std::string> keys() const;
  /// What is under one key; tensors whole and on the CPU. Error naming the keys most like it if
  /// there is none.
  Value load_one(const std::string& key) const;
  /// Everything, without a template.
  StateDict load_everything() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Reader(folder).load_everything()
StateDict load_everything(const std::string& folder);
/// Reader(folder).load_one(key)
Value load_one(const std::string& folder, const std::string& key);

/// What verify() found.
struct VerifyReport {
  int64_t items = 0;
  uint64_t bytes = 0;
  bool has_checksums = false;         // else only the structure was checked
  std::vector<std::string> problems;  // one a damaged item; empty: sound
};
/// Reads all of the checkpoint in `folder`. `progress` is called with the bytes that are done and
/// those that there are. Local.
VerifyReport verify(const std::string& folder,
                    const std::function<void(uint64_t done, uint64_t all)>& progress = {});

/// One file as torch.save writes it, which torch.load reads. Sharded tensors are an error.
void write_torch_file(const StateDict& state, const std::string& path);
/// Of such a file what C++ has a counterpart of: tensors, numbers, strings, lists, dicts. Nothing
/// in it is run.
Value read_torch_file(const std::string& path);

}  // namespace fsdp2::dcp
