// Host memory that HIXL can register.
#pragma once

#include "memory.hpp"

namespace hx {

// Return the address of `size` zeroed bytes, with the way they were made in `mem`, or nullptr if there are none.
void *host_alloc(hxa_instance &self, uint64_t size, hxa_mem &mem);
void host_free(const hxa_mem &mem);

}  // namespace hx
