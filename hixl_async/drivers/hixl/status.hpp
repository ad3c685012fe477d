// Codes of HIXL and AscendCL as hxa_status, and texts for them.
#pragma once

#include <cstdint>

#include "abi.hpp"
#include "hxa_driver.h"
#include "options.hpp"

namespace hx {

// The outcome of one call.
struct Outcome {
    int32_t status = HXA_OK;  // hxa_status
    int32_t native = 0;
    uint32_t scope = HXA_SCOPE_OP;

    bool ok() const { return status == HXA_OK; }
};

int32_t status_of(uint32_t native);
inline Outcome outcome_of(uint32_t native) { return {status_of(native), static_cast<int32_t>(native), HXA_SCOPE_OP}; }

// Two cases that HIXL has no code for: the two ends of a link have different back-ends, or (theirs: AUTO) backend=comm was
// asked for and this NPU does not have it.  HXA_E_UNSUPPORTED, with both in `native`.
constexpr int32_t native_of(Backend ours, Backend theirs) {
    return -(static_cast<int32_t>(ours) * 4 + static_cast<int32_t>(theirs));
}

const char *error_text(int32_t status, int32_t native);

}  // namespace hx
