// The eventfd that makes the loop poll a link.
#pragma once

#include <string>

#include "hxa_driver.h"

namespace hx {

// Any thread: poll has something to hand out.
void ring_doorbell(hxa_link *link);
// Any thread: poll is to report LINK_DOWN, once all notifications up to `after` are handed out.
void end_link(hxa_link *link, uint64_t after, const std::string &why);
// The loop: return true if it rang.
bool clear_doorbell(hxa_link *link);

}  // namespace hx
