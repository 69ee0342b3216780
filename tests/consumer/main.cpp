#include <fsdp2/fsdp2.h>

#include <iostream>

int main() {
  std::cout << "rank " << fsdp2::get_rank() << " of " << fsdp2::get_world_size() << std::endl;
  return 0;
}
