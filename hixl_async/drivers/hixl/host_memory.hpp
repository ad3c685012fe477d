// Host memory that HIXL can register.
#pragma once

#include "memory.hpp"

namespace hx {

// The address of `size` bytes, all zero, and in `mem` how they were made; nullptr: there are none.
void *host_alloc(hxa_instance &self, uint64_t size, hxa_mem &mem);
void host_free(const hxa_mem &mem);

}  // namespace hx
