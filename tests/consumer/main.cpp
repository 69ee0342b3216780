#include <fsdp2/fsdp2.h>

#include <iostream>

int main() {
  const fsdp2::DeviceMesh mesh;
  std::cout << (mesh.defined() ? "a mesh" : "no mesh") << std::endl;
  return 0;
}
