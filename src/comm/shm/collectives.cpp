#include "comm/shm/collectives.h"

#include "comm/reduce.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace fsdp2::comm {
namespace {

void copy_bytes(std::byte* to, const std::byte* from, int64_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, static_cast<size_t>(bytes));
}

}  // namespace

bool ShmSpread::write(uint32_t index, std::byte* to) {
  if (!send) return true;
  const int64_t offset = index * capacity;
  const int64_t now = std::min(capacity, bytes - offset);
  copy_bytes(to, send + offset, now);
  if (own) copy_bytes(own + offset, send + offset, now);
  return offset + now == bytes;
}

void ShmSpread::read(int peer, uint32_t index, const std::byte* from, bool /*last*/) {
  std::byte* to = receive.empty() ? nullptr : receive[static_cast<size_t>(peer)];
  const int64_t offset = index * capacity;
  if (to) copy_bytes(to + offset, from, std::min(capacity, bytes - offset));
}

// A chunk begins with the bytes that are in it for each rank; these follow, in order of rank.
bool ShmExchange::write(uint32_t index, std::byte* to) {
  const auto own = static_cast<size_t>(rank);
  if (index == 0) copy_bytes(receive[own].data, send[own].data, send[own].bytes);
  auto* lengths = reinterpret_cast<int64_t*>(to);
  int64_t open = 0;
  for (size_t peer = 0; peer < send.size(); ++peer) {
    lengths[peer] = 0;
    if (peer != own && send[peer].moved < send[peer].bytes) ++open;
  }
  const auto header = static_cast<int64_t>((send.size() * sizeof(int64_t) + 63) / 64 * 64);
  const int64_t room = open > 0 ? (capacity - header) / open / 64 * 64 : 0;
  std::byte* next = to + header;
  bool last = true;
  for (size_t peer = 0; peer < send.size(); ++peer) {
    Part& part = send[peer];
    if (peer == own) continue;
    lengths[peer] = std::min(room, part.bytes - part.moved);
    copy_bytes(next, part.data + part.moved, lengths[peer]);
    next += lengths[peer];
    part.moved += lengths[peer];
    if (part.moved < part.bytes) last = false;
  }
  return last;
}

void ShmExchange::read(int peer, uint32_t /*index*/, const std::byte* from, bool last) {
  const auto* lengths = reinterpret_cast<const int64_t*>(from);
  const std::byte* data = from + (send.size() * sizeof(int64_t) + 63) / 64 * 64;
  for (int other = 0; other < rank; ++other) data += lengths[other];
  Part& part = receive[static_cast<size_t>(peer)];
  const int64_t now = lengths[rank];
  TORCH_CHECK(part.moved + now <= part.bytes && (!last || part.moved + now == part.bytes),
              "ranks do not agree in ", call.text(), " of group '", who->name(), "': rank ",
              who->global_rank(peer), " sends ", last ? "" : "at least ", part.moved + now,
              " bytes to rank ", who->global_rank(rank), ", which expects ", part.bytes);
  copy_bytes(part.data + part.moved, data, now);
  part.moved += now;
}

void ShmReduction::reduce(std::byte* output, c10::ArrayRef<const std::byte*> inputs,
                          int64_t count) const {
  reduce_in_order(output, inputs, count, type, op);
}

bool ShmReduceWhole::write(uint32_t index, std::byte* to) {
  const int64_t offset = index * capacity;
  const int64_t now = std::min(capacity, bytes - offset);
  copy_bytes(to, send + offset, now);
  if (size == 1 && output) reduce(output + offset, {send + offset}, now);
  return offset + now == bytes;
}

void ShmReduceWhole::read_all(uint32_t index, std::span<const std::byte*> from) {
  if (!output) return;
  const int64_t offset = index * capacity;
  from[static_cast<size_t>(rank)] = send + offset;
  reduce(output + offset, {from.data(), from.size()}, std::min(capacity, bytes - offset));
}

bool ShmReduceScatter::write(uint32_t index, std::byte* to) {
  const int64_t offset = index * share();
  const int64_t now = std::min(share(), bytes - offset);
  for (int peer = 0; peer < size; ++peer) {
    if (peer != rank)
      copy_bytes(to + peer * share(), send[static_cast<size_t>(peer)] + offset, now);
  }
  if (size == 1) reduce(output + offset, {send[0] + offset}, now);
  return offset + now == bytes;
}

void ShmReduceScatter::read_all(uint32_t index, std::span<const std::byte*> from) {
  const int64_t offset = index * share();
  for (int peer = 0; peer < size; ++peer) {
    const auto at = static_cast<size_t>(peer);
    from[at] = peer == rank ? send[at] + offset : from[at] + rank * share();
  }
  reduce(output + offset, {from.data(), from.size()}, std::min(share(), bytes - offset));
}

int64_t ShmReduceInBlocks::blocks() const {
  const int64_t block = share() * size;
  return std::max<int64_t>(1, (bytes + block - 1) / block);
}

ShmReduceInBlocks::Step ShmReduceInBlocks::step(uint32_t index) const {
  if (index == 0) return {false, 0};
  const int64_t pair = (index - 1) / 2;
  if (index % 2 == 1 && pair + 1 < blocks()) return {false, pair + 1};
  return {true, pair};
}

std::pair<int64_t, int64_t> ShmReduceInBlocks::part(int64_t block, int of) const {
  const int64_t start = block * share() * size;
  const int64_t here = std::min(share() * size, bytes - start);
  const int64_t each = (here + int64_t{64} * size - 1) / (int64_t{64} * size) * 64;
  const int64_t from = std::min(here, each * of);
  return {start + from, std::min(each, here - from)};
}

bool ShmReduceInBlocks::can_write(uint32_t index) const {
  const Step now = step(index);
  return !now.result || now.block < reduced_;
}

bool ShmReduceInBlocks::write(uint32_t index, std::byte* to) {
  const Step now = step(index);
  const int64_t start = now.block * share() * size;
  for (int peer = 0; peer < size; ++peer) {
    const auto [from, count] = part(now.block, peer);
    if ((peer == rank) == now.result) copy_bytes(to + (from - start), data + from, count);
  }
  return now.result && now.block + 1 == blocks();
}

void ShmReduceInBlocks::read_all(uint32_t index, std::span<const std::byte*> from) {
  const Step now = step(index);
  const int64_t start = now.block * share() * size;
  if (now.result) {
    for (int peer = 0; peer < size; ++peer) {
      const auto [offset, count] = part(now.block, peer);
      if (peer != rank)
        copy_bytes(data + offset, from[static_cast<size_t>(peer)] + (offset - start), count);
    }
    return;
  }
  const auto [offset, count] = part(now.block, rank);
  for (const std::byte*& input : from) {
    if (input) input += offset - start;
  }
  from[static_cast<size_t>(rank)] = data + offset;
  reduce(data + offset, {from.data(), from.size()}, count);
  ++reduced_;
}

}  // namespace fsdp2::comm
