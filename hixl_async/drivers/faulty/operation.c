#include "operation.h"

#include <stdlib.h>

static void ring(faulty_alarm *alarm) {
    faulty_operation *operation = (faulty_operation *)(void *)((char *)alarm - offsetof(faulty_operation, alarm));
    operation->kind->due(operation);
}

faulty_operation *faulty_operation_new(hxa_instance *self, hxa_link *link, hxa_op *outer, const faulty_kind *kind) {
    faulty_operation_free_dead(self);
    faulty_operation *operation = (faulty_operation *)calloc(1, sizeof *operation);
    if (operation == NULL) return NULL;
    faulty_ring_init(&operation->all);
    faulty_ring_init(&operation->ready);
    operation->alarm.ring = ring;
    operation->op.owner = operation;
    operation->op.failed = -1;
    operation->outer = outer;
    operation->self = self;
    operation->link = link;
    operation->kind = kind;
    return operation;
}

void faulty_operation_free(faulty_operation *operation) {
    if (operation->mem != NULL) {
        operation->self->table->mem_release(operation->mem->inner);
        free(operation->mem);
    }
    free(operation->desc);
    free(operation);
}

/* The loop may be using it right now (cancel, progress), so that only the loop frees it. */
void faulty_operation_free_later(faulty_operation *operation) {
    hxa_instance *self = operation->self;
    faulty_operation *head = __atomic_load_n(&self->dead, __ATOMIC_RELAXED);
    do operation->chain = head;
    while (!__atomic_compare_exchange_n(&self->dead, &head, operation, 1, __ATOMIC_RELEASE, __ATOMIC_RELAXED));
}

void faulty_operation_free_dead(hxa_instance *self) {
    if (__atomic_load_n(&self->dead, __ATOMIC_RELAXED) == NULL) return;
    faulty_operation *operation = __atomic_exchange_n(&self->dead, NULL, __ATOMIC_ACQUIRE);
    while (operation != NULL) {
        faulty_operation *next = operation->chain;
        faulty_operation_free(operation);
        operation = next;
    }
}

void faulty_post(void *ctx, hxa_op *op, uint32_t events) {
    (void)ctx;
    faulty_operation *operation = (faulty_operation *)op->owner;
    operation->kind->posted(operation, events);
}

void faulty_operation_hold(faulty_operation *operation) {
    operation->held = 1;
    __atomic_fetch_add(&operation->self->block->holding, 1, __ATOMIC_RELAXED);
}

void faulty_operation_unwait(faulty_operation *operation) {
    faulty_timer_clear(&operation->self->timer, &operation->alarm);
    faulty_ring_remove(&operation->ready);
    if (operation->held) {
        operation->held = 0;
        __atomic_fetch_sub(&operation->self->block->holding, 1, __ATOMIC_RELAXED);
    }
}
