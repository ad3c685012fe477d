// The life of an instance: open, Initialize, Finalize, close.
#pragma once

#include "instance.hpp"

namespace hx {

int instance_open(const hxa_option *options, size_t n, const hxa_sink *sink, hxa_instance **made, char *error,
                  size_t error_len);
void instance_close(hxa_instance *self);
void instance_after_fork(hxa_instance *self);
void instance_limits(hxa_instance *self, hxa_limits *out);
void instance_stats(hxa_instance *self, hxa_stats *out);
int instance_start(hxa_instance *self, hxa_op *op);
int instance_shutdown(hxa_instance *self, hxa_op *op);

}  // namespace hx
