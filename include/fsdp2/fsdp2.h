#pragma once

#include <fsdp2/all_gather_formats.h>
#include <fsdp2/activation_checkpoint.h>
#include <fsdp2/collectives.h>
#include <fsdp2/custom_comm.h>
#include <fsdp2/device_mesh.h>
#include <fsdp2/dtensor.h>
#include <fsdp2/for_each_tensor.h>
#include <fsdp2/fully_shard.h>
#include <fsdp2/hooked.h>
#include <fsdp2/meta_device.h>
#include <fsdp2/mixed_precision.h>
#include <fsdp2/module_states.h>
#include <fsdp2/placement.h>
#include <fsdp2/process_group.h>
