#include "registry.h"

#include "link.h"

static pthread_mutex_t registry = PTHREAD_MUTEX_INITIALIZER;
static hxa_instance *instances;

hxa_instance *faulty_registry_lock(void) {
    pthread_mutex_lock(&registry);
    return instances;
}

void faulty_registry_unlock(void) { pthread_mutex_unlock(&registry); }

void faulty_registry_add(hxa_instance *self, faulty_command *command) {
    pthread_mutex_lock(&registry);
    self->next = instances;
    instances = self;
    faulty_store(&self->block->command, (uint64_t)(uintptr_t)command);
    pthread_mutex_unlock(&registry);
}

static void forget(hxa_instance *self) {
    hxa_instance **at = &instances;
    while (*at != NULL && *at != self) at = &(*at)->next;
    if (*at != NULL) *at = self->next;
}

void faulty_registry_remove(hxa_instance *self) {
    pthread_mutex_lock(&registry);
    forget(self);
    pthread_mutex_unlock(&registry);
}

/* In the child of a fork the thread that held the lock, if any, does not exist. */
void faulty_registry_forked(hxa_instance *self) {
    pthread_mutex_init(&registry, NULL);
    forget(self);
}

void faulty_registry_add_link(hxa_link *link) {
    pthread_mutex_lock(&registry);
    link->next = link->self->links;
    link->self->links = link;
    pthread_mutex_unlock(&registry);
}

void faulty_registry_remove_link(hxa_link *link) {
    pthread_mutex_lock(&registry);
    hxa_link **at = &link->self->links;
    while (*at != link) at = &(*at)->next;
    *at = link->next;
    pthread_mutex_unlock(&registry);
}
