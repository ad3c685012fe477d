// The facts that `hixl-async info` and `engine.driver_facts()` show.
#pragma once

#include "hxa_driver.h"

namespace hx {

const char *instance_about(hxa_instance *self);

}  // namespace hx
