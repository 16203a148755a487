package admission

// ticketState is what the pool keeps in a ticket between Admit and Done.
type ticketState struct {
	phase uint8
}
