#pragma once

#include "hixl.hpp"

namespace hx {

int mem_alloc(hxa_instance *self, uint64_t size, uint32_t rights, hxa_mem **mem, void **address);
int mem_register(hxa_instance *self, void *address, uint64_t size, uint32_t kind, uint32_t rights, hxa_mem **mem);
int mem_export(hxa_mem *mem, uint32_t rights, hxa_card *card);
int mem_import(hxa_link *link, const hxa_card *card, uint64_t size, uint32_t rights, hxa_mem **mem, hxa_op *op);
void mem_release(hxa_mem *mem);
int mem_ready(hxa_mem *mem, hxa_op *op);
int mem_retire(hxa_mem *mem, hxa_op *op);

}  // namespace hx
