/* A doubly linked ring with a head; a node is in one ring at most. */
#ifndef HXA_FAULTY_RING_H
#define HXA_FAULTY_RING_H

typedef struct faulty_node { struct faulty_node *next, *prev; } faulty_node;

static inline void faulty_ring_init(faulty_node *head) { head->next = head->prev = head; }
static inline int faulty_ring_empty(const faulty_node *head) { return head->next == head; }

static inline void faulty_ring_add(faulty_node *head, faulty_node *node) {
    node->prev = head->prev;
    node->next = head;
    head->prev->next = node;
    head->prev = node;
}

static inline void faulty_ring_remove(faulty_node *node) {
    node->prev->next = node->next;
    node->next->prev = node->prev;
    faulty_ring_init(node);
}

#endif /* HXA_FAULTY_RING_H */
