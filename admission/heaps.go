package admission

// The two small heaps of the held queue, kept apart from container/heap: its
// interfaces allocate and call through tables.

func tenantLess(a, b *tenantQueue) bool {
	return a.served < b.served || a.served == b.served && a.id < b.id
}

func (b *band) swap(i, j int) {
	a := b.active
	a[i], a[j] = a[j], a[i]
	a[i].heap, a[j].heap = i, j
}

func (b *band) up(i int) {
	for i > 0 {
		parent := (i - 1) / 2
		if !tenantLess(b.active[i], b.active[parent]) {
			return
		}
		b.swap(i, parent)
		i = parent
	}
}

func (b *band) down(i int) {
	for {
		c := 2*i + 1
		if c >= len(b.active) {
			return
		}
		if c+1 < len(b.active) && tenantLess(b.active[c+1], b.active[c]) {
			c++
		}
		if !tenantLess(b.active[c], b.active[i]) {
			return
		}
		b.swap(i, c)
		i = c
	}
}

func (b *band) fix(i int) {
	b.up(i)
	b.down(i)
}

// leave takes a tenant out of the heap of those with held tickets.
func (b *band) leave(q *tenantQueue) {
	i, last := q.heap, len(b.active)-1
	b.swap(i, last)
	b.active[last] = nil
	b.active = b.active[:last]
	q.heap = -1
	if i < last {
		b.fix(i)
	}
}

func expireLess(a, b *Ticket) bool {
	return a.expire < b.expire || a.expire == b.expire && a.seq < b.seq
}

func (h *heldQueue) expSwap(i, j int) {
	e := h.expiry
	e[i], e[j] = e[j], e[i]
	e[i].heap, e[j].heap = i, j
}

func (h *heldQueue) expUp(i int) {
	for i > 0 {
		parent := (i - 1) / 2
		if !expireLess(h.expiry[i], h.expiry[parent]) {
			return
		}
		h.expSwap(i, parent)
		i = parent
	}
}

func (h *heldQueue) expDown(i int) {
	for {
		c := 2*i + 1
		if c >= len(h.expiry) {
			return
		}
		if c+1 < len(h.expiry) && expireLess(h.expiry[c+1], h.expiry[c]) {
			c++
		}
		if !expireLess(h.expiry[c], h.expiry[i]) {
			return
		}
		h.expSwap(i, c)
		i = c
	}
}

func (h *heldQueue) expRemove(t *Ticket) {
	i, last := t.heap, len(h.expiry)-1
	h.expSwap(i, last)
	h.expiry[last] = nil
	h.expiry = h.expiry[:last]
	if i < last {
		h.expUp(i)
		h.expDown(i)
	}
}
