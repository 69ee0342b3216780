#include "comm/share_memory.h"

#include "comm/counting.h"
#include "comm/groups.h"
#include "comm/rendezvous.h"

#include <fsdp2/collectives.h>

#include <c10/util/Exception.h>

#include <algorithm>

namespace fsdp2::comm {

std::shared_ptr<SharedMemory> share_memory(const ProcessGroup& group, size_t bytes,
                                           const std::string& name) {
  const Uncounted uncounted;
  for (const std::string& wanted : all_gather_bytes(std::to_string(bytes), group)) {
    bytes = std::max<size_t>(bytes, std::stoull(wanted));
  }
  std::shared_ptr<SharedMemory> memory;
  std::string error;
  const auto attempt = [&](const auto& make) {
    try {
      memory = make();
    } catch (const std::exception& failed) {
      error = plain_message(failed);
    }
  };
  if (group->getRank() == 0) attempt([&] { return SharedMemory::create(bytes, name); });
  const std::string ticket = all_gather_bytes(memory ? memory->ticket() : "", group)[0];
  if (group->getRank() != 0 && !ticket.empty()) attempt([&] { return SharedMemory::open(ticket); });
  const std::vector<std::string> errors = all_gather_bytes(error, group);
  for (size_t rank = 0; rank < errors.size(); ++rank) {
    TORCH_CHECK(errors[rank].empty(), "rank ", global_ranks(group)[rank], " of group '",
                group->getGroupName(), "' cannot share memory for ", name, ": ", errors[rank]);
  }
  return memory;
}

}  // namespace fsdp2::comm
