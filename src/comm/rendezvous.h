#pragma once

// Where the ranks of a world meet: the store, who has arrived, and what they say of their hosts and
// devices.

#include "comm/environment.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>
#include <vector>

namespace fsdp2::comm {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// The store at the address in `membership`: served by rank 0 or by the launcher; in memory for a
/// world of one without an address. A served store is kept until the process ends, so that a world
/// can be left and joined again. Error naming the address if it cannot be bound or reached in time.
StorePtr open_store(const Membership& membership, std::chrono::milliseconds timeout);
/// Whether this process serves the store at the address.
bool serves_store(const Membership& membership);
/// Forgets the store kept for the address: after a failed join the next one starts afresh.
void forget_store(const Membership& membership);

/// Says at `store` that this rank is there, and returns the part of it that is for this world only:
/// an earlier world's keys are not visible in it. Error if a living process has this RANK.
StorePtr enter(const StorePtr& store, const Membership& membership, bool use_cuda,
               std::chrono::milliseconds timeout);

struct Meeting {
  int local_rank = 0;  // LOCAL_RANK, or else the number of lower ranks on this host
  /// By rank; equal where processes can share memory. The host's name comes first, up to a '/'.
  std::vector<std::string> hosts;
};

/// Waits until all ranks have entered. The same error on all ranks if two of them share a device,
/// naming both; after `timeout`, an error naming those missing.
Meeting meet(const StorePtr& entered, const Membership& membership,
             std::chrono::milliseconds timeout);

/// Says that this rank needs the store no more. The one that serves it stays until all that entered
/// have left, for 5 s at most: one that failed never says so. Never throws.
void leave(const StorePtr& entered, bool serves);

/// Says in `store` that `rank` is here, with `value`, and waits for the rest of `ranks`. `ranks`
/// are those of the world, `what` is what they join. Returns the value of ranks[0].
std::string wait_for_ranks(const StorePtr& store, int rank, const std::vector<int>& ranks,
                           const std::string& value, const std::string& what,
                           std::chrono::milliseconds timeout);

/// The same, and returns the values of all of them, in the order of `ranks`.
std::vector<std::string> exchange_texts(const StorePtr& store, int rank,
                                        const std::vector<int>& ranks, const std::string& value,
                                        const std::string& what, std::chrono::milliseconds timeout);

/// "10 s" or "250 ms".
std::string duration_text(std::chrono::milliseconds duration);
/// "0, 2, 5"
std::string list_text(const std::vector<int>& numbers);
/// An error's message without torch's backtrace.
std::string plain_message(const std::exception& error);

}  // namespace fsdp2::comm
