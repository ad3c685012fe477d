#include "command.h"

#include "link.h"
#include "message.h"
#include "operation.h"
#include "outcome.h"
#include "registry.h"
#include "stop.h"
#include "work.h"

/* With the instance's lock held: return the oldest held operation of a ring after number `after`, if it is older than `oldest`. */
static faulty_operation *older(faulty_node *ring, uint64_t after, faulty_operation *oldest) {
    for (faulty_node *node = ring->next; node != ring; node = node->next) {
        faulty_operation *operation = faulty_operation_of(node);
        const uint64_t number = operation->alarm.number;
        if (operation->held && number > after && (oldest == NULL || number < oldest->alarm.number)) oldest = operation;
    }
    return oldest;
}

/* Calls are younger than all work, see call.c. */
static faulty_operation *next_held(hxa_instance *self, uint64_t after) {
    faulty_operation *oldest = NULL;
    for (hxa_link *link = self->links; link != NULL; link = link->next) oldest = older(&link->operations, after, oldest);
    return older(&self->calls, after, oldest);
}

static void release(faulty_operation *operation) {
    faulty_count(&operation->self->block->released);
    operation->kind->released(operation);
}

static void release_all(hxa_instance *instances, faulty_block *block) {
    for (hxa_instance *self = instances; self != NULL; self = self->next) {
        if (self->block != block) continue;
        pthread_mutex_lock(&self->lock);
        for (faulty_operation *operation; (operation = next_held(self, 0)) != NULL;) release(operation);
        pthread_mutex_unlock(&self->lock);
    }
}

/* Release the n-th oldest of the held operations of all instances that use the block. */
static void release_one(hxa_instance *instances, faulty_block *block, uint64_t n) {
    uint64_t after = 0, oldest = 0;
    hxa_instance *owner = NULL;
    for (; n != 0; n--, after = oldest) {
        owner = NULL;
        for (hxa_instance *self = instances; self != NULL; self = self->next) {
            if (self->block != block) continue;
            pthread_mutex_lock(&self->lock);
            const faulty_operation *operation = next_held(self, after);
            if (operation != NULL && (owner == NULL || operation->alarm.number < oldest)) {
                owner = self;
                oldest = operation->alarm.number;
            }
            pthread_mutex_unlock(&self->lock);
        }
        if (owner == NULL) return;
    }
    if (owner == NULL) return;
    pthread_mutex_lock(&owner->lock);
    faulty_operation *operation = next_held(owner, oldest - 1);
    if (operation != NULL && operation->alarm.number == oldest) release(operation);
    pthread_mutex_unlock(&owner->lock);
}

static void tell_links(hxa_instance *instances, faulty_block *block, uint32_t what, uint64_t argument) {
    for (hxa_instance *self = instances; self != NULL; self = self->next) {
        if (self->block != block) continue;
        for (hxa_link *link = self->links; link != NULL; link = link->next) {
            if (what == FAULTY_BREAK) faulty_outcome_break(link);
            else faulty_message_send(link, (const faulty_message *)(uintptr_t)argument);
        }
    }
}

/* On the loop's thread the released work is submitted before this returns; elsewhere when the loop polls. */
void faulty_run_command(faulty_block *block, uint32_t what, uint64_t argument) {
    enum { MOST = 64 };
    hxa_instance *mine[MOST];
    size_t n = 0;
    hxa_instance *instances = faulty_registry_lock();
    if (what == FAULTY_RELEASE && argument == 0) release_all(instances, block);
    else if (what == FAULTY_RELEASE) release_one(instances, block, argument);
    else tell_links(instances, block, what, argument);
    for (hxa_instance *self = instances; self != NULL && n < MOST; self = self->next)
        if (self->block == block && pthread_equal(self->loop, pthread_self())) mine[n++] = self;
    faulty_registry_unlock();
    for (size_t i = 0; i < n; i++)
        for (hxa_link *link = mine[i]->links; link != NULL; link = link->next) {
            while (faulty_submit_ready(link, UINT32_MAX)) {}
            faulty_stops_issue(link);
        }
}
