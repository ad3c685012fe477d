#include "steps.h"

#include <stdlib.h>

/* Copy the batch with our memories replaced by the wrapped driver's.  A stall may divide a descriptor. */
static int translate(faulty_operation *operation, const hxa_batch *batch, uint64_t stall_bytes, size_t *cut) {
    size_t n = 0;
    uint64_t before = 0;
    *cut = 0;
    if (batch->n == 0) return 0;
    operation->desc = (hxa_desc *)malloc((batch->n + 1) * sizeof *operation->desc);
    if (operation->desc == NULL) return -HXA_E_NOMEM;
    for (size_t i = 0; i < batch->n; i++) {
        hxa_desc desc = batch->desc[i];
        if (desc.lmem != NULL) desc.lmem = desc.lmem->inner;
        desc.rmem = desc.rmem->inner;
        const uint64_t after = before + desc.len;
        if (stall_bytes > before && stall_bytes < after) {
            operation->desc[n] = desc;
            operation->desc[n++].len = stall_bytes - before;
            desc.loff += stall_bytes - before;
            desc.roff += stall_bytes - before;
            desc.len = after - stall_bytes;
            operation->split = n;
        }
        if (stall_bytes > before && stall_bytes <= after) *cut = stall_bytes == after ? n + 1 : n;
        operation->desc[n++] = desc;
        before = after;
    }
    return 0;
}

static void add_step(faulty_operation *operation, size_t first, size_t end, uint32_t tail, uint32_t wait, uint64_t delay) {
    faulty_step *step = &operation->steps[operation->step_count++];
    *step = (faulty_step){.first = first, .n = end - first, .tail = tail, .wait = wait, .delay = delay};
    for (size_t i = first; i < end; i++) step->bytes += operation->desc[i].len;
}

int faulty_steps_plan(faulty_operation *operation, const hxa_batch *batch) {
    faulty_effects *effects = &operation->effects;
    const uint32_t tail = batch->signal != NULL || batch->topic != NULL;
    uint64_t stall_bytes = 0;
    if (effects->stall != 0 && !effects->fail && batch->bytes != 0) {
        stall_bytes = (uint64_t)((double)batch->bytes * (double)(effects->stall - 1) / 1e6);
        if (stall_bytes >= batch->bytes) stall_bytes = batch->bytes - 1;
    }
    size_t cut;
    const int status = translate(operation, batch, stall_bytes, &cut);
    if (status != 0) return status;
    const size_t n = batch->n + (operation->split != 0);
    operation->batch = batch;
    if (effects->fail) {
        const size_t lands = effects->index <= 0 ? 0 : (uint64_t)effects->index < n ? (size_t)effects->index : n;
        if (lands != 0) add_step(operation, 0, lands, 0, FAULTY_OPEN, 0);
        return 0;
    }
    if (cut != 0) add_step(operation, 0, cut, 0, FAULTY_OPEN, 0);
    const uint32_t wait = cut != 0 ? FAULTY_HELD : FAULTY_OPEN;
    const int apart = tail && n != 0 && effects->note_delay != 0;
    add_step(operation, cut, n, !apart, wait, 0);
    if (apart) add_step(operation, n, n, 1, FAULTY_UNTIL, effects->note_delay);
    /* A delay or stall before the first byte delays or holds the whole operation. */
    if (n == 0) effects->delay += effects->note_delay;
    effects->hold |= effects->stall != 0 && batch->bytes != 0 && cut == 0;
    return 0;
}

void faulty_steps_load(faulty_operation *operation) {
    const faulty_step *step = &operation->steps[operation->step];
    operation->part = *operation->batch;
    operation->part.n = step->n;
    operation->part.desc = step->n != 0 ? operation->desc + step->first : NULL;
    operation->part.bytes = step->bytes;
    if (!step->tail) {
        operation->part.signal = NULL;
        operation->part.topic = NULL;
    } else if (operation->part.signal != NULL) operation->part.signal = operation->part.signal->inner;
    operation->op.status = operation->op.native = 0;
    operation->op.scope = HXA_SCOPE_OP;
    operation->op.failed = -1;
    operation->op.bytes = 0;
    __atomic_store_n(&operation->op.events, 0, __ATOMIC_RELAXED);
}

int64_t faulty_steps_failed(const faulty_operation *operation) {
    if (operation->op.failed < 0) return -1;
    const size_t index = (size_t)operation->op.failed + operation->steps[operation->step].first;
    return (int64_t)(operation->split != 0 && index >= operation->split ? index - 1 : index);
}
