#pragma once

#include "hixl.hpp"

namespace hx {

int link_new(hxa_instance *self, uint64_t cookie, hxa_link **link, hxa_card *card);
int link_connect(hxa_link *link, const hxa_card *card, hxa_op *op);
int link_fd(hxa_link *link);
int link_stop(hxa_link *link, int dead, hxa_op *op);
int link_fence(hxa_link *link, hxa_op *op);
void link_free(hxa_link *link);
int link_poll(hxa_link *link, uint32_t budget);
int link_message(hxa_link *link, const void *data, size_t len);

int submit(hxa_link *link, const hxa_batch *batch, hxa_op *op);
int cancel(hxa_link *link, hxa_op *op);
uint64_t progress(hxa_link *link, const hxa_op *op);
int abandon(hxa_link *link, hxa_op *op);

// Any thread: poll has something to hand out.
void link_ring(hxa_link *link);
// Any thread: poll is to report LINK_DOWN, once all notifications up to `after` are handed out.
void link_end(hxa_link *link, uint64_t after, const std::string &text);

}  // namespace hx
